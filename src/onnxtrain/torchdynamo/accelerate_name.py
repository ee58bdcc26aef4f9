"""The name of the backend for Accelerate, and with it for the Trainer of Transformers, which take those of a list.

This is the one place that adds to another library's table.
"""

from __future__ import annotations

from onnxtrain.errors import ModuleError

NAME = "ONNXTRAIN"


def allow_in_accelerate() -> None:
    """Let Accelerate take the name: ``Accelerator(dynamo_backend="onnxtrain")``, ``torch_compile_backend="onnxtrain"``.

    Its list has ``onnxrt``, which is this backend too and needs no such call.

    Raises:
        ModuleError: Accelerate is not installed.
    """
    try:
        from accelerate.utils import DynamoBackend
    except ImportError as error:
        raise ModuleError("accelerate is not installed", cure="pip install accelerate") from error
    if NAME not in DynamoBackend.__members__:
        _add(DynamoBackend)


def _add(backends: type) -> None:
    """Add a member to an enumeration of texts, as its class statement would have."""
    member = str.__new__(backends, NAME)
    member._name_ = member._value_ = NAME
    member.__objclass__, member._sort_order_ = backends, len(backends.__members__)
    backends._member_names_.append(NAME)
    backends._member_map_[NAME] = backends._value2member_map_[NAME] = member
    type.__setattr__(backends, NAME, member)
