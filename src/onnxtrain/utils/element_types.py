"""Element types of torch and of ONNX, each from the other."""

from __future__ import annotations

import torch

from onnxtrain.errors import UnsupportedDataError
from onnxtrain.execute.torch.dtypes import onnx_dtype, torch_dtype

_SCALAR_TYPES = {
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Half": torch.float16, "Float": torch.float32, "Double": torch.float64, "BFloat16": torch.bfloat16,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Bool": torch.bool,
}  # fmt: skip


def pytorch_type_to_onnx_dtype(dtype: torch.dtype | str) -> int:
    """ONNX's code (``TensorProto.DataType``) for an element type of torch, or for a scalar type's name (``"Float"``).

    Raises:
        BackendError: ONNX has no such type.
        UnsupportedDataError: torch has no scalar type of that name.
    """
    return onnx_dtype(pytorch_scalar_type_to_pytorch_dtype(dtype) if isinstance(dtype, str) else dtype)


def onnx_dtype_to_pytorch_dtype(dtype: int) -> torch.dtype:
    """Torch's element type for ONNX's code.

    Raises:
        BackendError: torch has no such type.
    """
    return torch_dtype(dtype)


def pytorch_scalar_type_to_pytorch_dtype(name: str) -> torch.dtype:
    """The element type that ATen calls by a scalar type's name: ``"Float"`` is ``torch.float32``.

    Raises:
        UnsupportedDataError: torch has no scalar type of that name.
    """
    if name not in _SCALAR_TYPES:
        raise UnsupportedDataError(f"torch has no scalar type {name!r}", cure=f"one of {', '.join(_SCALAR_TYPES)}")
    return _SCALAR_TYPES[name]
