"""ONNX element types and constants as torch's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import BackendError

_TYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
}


def torch_dtype(code: int) -> torch.dtype:
    """Torch's element type for ONNX's code (``TensorProto.DataType``).

    Raises:
        BackendError: torch has no such type.
    """
    found = _TYPES.get(ir.DataType(code))
    if found is None:
        raise BackendError(f"torch has no element type {ir.DataType(code).name}")
    return found


def onnx_dtype(dtype: torch.dtype) -> int:
    """ONNX's code (``TensorProto.DataType``) for torch's element type.

    Raises:
        BackendError: ONNX has no such type.
    """
    for code, known in _TYPES.items():
        if known == dtype:
            return int(code)
    raise BackendError(f"ONNX has no element type {dtype}")


def as_tensor(array: np.ndarray | None, device: str) -> torch.Tensor:
    """A constant as a tensor; numpy's bfloat16 is not known to torch."""
    if array is not None and array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array)).to(device)
