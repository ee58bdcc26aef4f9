"""Tensors of a shape that hold one number, and ranges."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import translation, typed, vector

aten = torch.ops.aten
_RANGES = (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE)  # types that Range knows


@translation(aten.full.default)
def full(size, value, dtype=None, **_: Any):
    """One Expand of the number."""
    return NotImplemented if dtype is None else op.Expand(typed(value, dtype), vector(size))


@translation(aten.zeros.default, aten.empty.memory_format)
def zeros(size, dtype=None, **_: Any):
    """Zeros, of float32 where no type is named."""
    return op.Expand(typed(0, dtype or ir.DataType.FLOAT), vector(size))


@translation(aten.ones.default)
def ones(size, dtype=None, **_: Any):
    """Ones, of float32 where no type is named."""
    return op.Expand(typed(1, dtype or ir.DataType.FLOAT), vector(size))


@translation(aten.new_full.default)
def new_full(x, size, value, dtype=None, **_: Any):
    """One Expand of the number."""
    return op.Expand(typed(value, dtype or x.dtype), vector(size))


@translation(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(x, size, dtype=None, **_: Any):
    """Zeros of the type of another tensor."""
    return op.Expand(typed(0, dtype or x.dtype), vector(size))


@translation(aten.new_ones.default)
def new_ones(x, size, dtype=None, **_: Any):
    """Ones of the type of another tensor."""
    return op.Expand(typed(1, dtype or x.dtype), vector(size))


@translation(aten.full_like.default)
def full_like(x, value, dtype=None, **_: Any):
    """A number in the shape of another tensor."""
    return op.Expand(typed(value, dtype or x.dtype), op.Shape(x))


@translation(aten.fill.Scalar, aten.fill.Tensor)
def fill(x, value):
    """A number in the place of all others; torch says that it requires a gradient, of zeros, if they did."""
    if not x.dtype.is_floating_point():
        return op.Expand(typed(value, x.dtype), op.Shape(x))
    return op.Where(op.Constant(value=ir.tensor(False)), x, typed(value, x.dtype))


@translation(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x, dtype=None, **_: Any):
    """Zeros in the shape of another tensor."""
    return op.Expand(typed(0, dtype or x.dtype), op.Shape(x))


@translation(aten.ones_like.default)
def ones_like(x, dtype=None, **_: Any):
    """Ones in the shape of another tensor."""
    return op.Expand(typed(1, dtype or x.dtype), op.Shape(x))


@translation(aten.scalar_tensor.default)
def scalar_tensor(value, dtype=None, **_: Any):
    """A tensor without dimensions."""
    return typed(value, dtype or ir.DataType.FLOAT)


@translation(aten.arange.default)
def arange(end, dtype=None, **_: Any):
    """One Range from 0."""
    return _range(0, end, 1, dtype)


@translation(aten.arange.start)
def arange_from(start, end, dtype=None, **_: Any):
    """One Range in steps of 1."""
    return _range(start, end, 1, dtype)


@translation(aten.arange.start_step)
def arange_by(start, end, step=1, dtype=None, **_: Any):
    """One Range."""
    return _range(start, end, step, dtype)


def _range(start: Any, end: Any, step: Any, dtype: Any) -> Any:
    """Of whole numbers: torch counts others in float64, and then rounds."""
    whole = all(x.dtype == ir.DataType.INT64 if isinstance(x, ir.Value) else type(x) is int for x in (start, end, step))
    if not whole or (dtype is not None and dtype not in _RANGES):
        return NotImplemented
    made = ir.DataType(dtype or ir.DataType.INT64)
    return op.Range(*(typed(x, made) for x in (start, end, step)))
