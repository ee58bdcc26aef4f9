"""Operators of PyTorch that are operators of a library of the user's in a graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import record_node
from onnxtrain.capture.translations import TRANSLATIONS
from onnxtrain.errors import OptionError


def register_custom_op(
    target: torch._ops.OpOverload | torch._ops.OpOverloadPacket,
    op_type: str,
    domain: str,
    *,
    attributes: Collection[str] = (),
) -> None:
    """Let a PyTorch operator be an operator of another domain in graphs.

    ``Options(backend="onnxruntime", custom_op_library=...)`` runs it by the library; the torch backend runs PyTorch's.
    ``onnxtrain.register_gradient`` says how it is differentiated.

    Args:
        target: the operator, as ``torch.ops`` has it.
        op_type: its name in the domain.
        domain: the library's domain.
        attributes: names of arguments that become attributes; tensors are inputs, in order.

    Raises:
        OptionError: an argument is neither a tensor nor among the attributes, or the operator is registered already.
    """
    overload = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
    schema = overload._schema
    _check_tensors(overload, attributes)
    if overload in TRANSLATIONS:
        raise OptionError(f"{overload} is translated already", cure="register it once")

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        values = {a.name: given.get(a.name, a.default_value) for a in schema.arguments}
        named = {name: values.pop(name) for name in attributes}
        made = {name: value for name, value in named.items() if value is not None}
        inputs: list[ir.Value | None] = list(values.values())
        return record_node(op_type, inputs, made, outputs=len(schema.returns), domain=domain)

    TRANSLATIONS[overload] = translate


def _check_tensors(overload: torch._ops.OpOverload, attributes: Collection[str]) -> None:
    """Raise OptionError where an argument is neither a tensor nor among the attributes."""
    for argument in overload._schema.arguments:
        if "Tensor" not in str(argument.type) and argument.name not in attributes:
            raise OptionError(
                f"the argument {argument.name} of {overload} is not a tensor",
                cure="name it among the attributes, if the operator has such a one",
            )
