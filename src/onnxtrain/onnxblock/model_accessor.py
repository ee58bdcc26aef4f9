"""The model under construction by the names of onnxruntime-training: ``model_accessor._GLOBAL_ACCESSOR.model``.

``_GLOBAL_ACCESSOR`` is what the innermost ``with base(...)`` or ``with empty_base()`` opened, None outside of them. Its
``model`` is a ``ModelProto`` that programs read and write; what that means is said at ``Base.model``.
"""

from __future__ import annotations

from typing import Any

from onnxtrain.onnxblock.base import Base, base, custom_op_library, empty_base, opened

ModelAccessor = Base

__all__ = ["ModelAccessor", "base", "custom_op_library", "empty_base"]


def __getattr__(name: str) -> Any:
    """The model that is open now, whenever it is asked for."""
    if name != "_GLOBAL_ACCESSOR":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return opened()
