"""Gradients of Fourier transforms: linear, so the gradient is the adjoint."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder

Value = ir.Value


@gradient("DFT")
def dft(
    ctx: Context,
    dy: Value,
    x: Value,
    length: Value | None = None,
    axis: Value | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Any:
    """The other direction without its 1/N: Fᴴ = N F⁻¹; bins that were left out are zeros, and so is the padding."""
    op = ctx.op
    at = -2 if axis is None else shapes.constant_of(axis)
    if at is None or (inverse and onesided):
        raise ctx.unsupported("the gradient of a DFT along an axis that is not constant, or one-sided and inverse")
    at = int(at) % shapes.rank(x)
    count = op.size(x, at) if length is None else op.Reshape(op.cast(length, ir.DataType.INT64), op.ints(1))
    scalar = op.Squeeze(count, op.ints(0))
    number = op.CastLike(scalar, dy)
    dx = op.DFT(dy, scalar, axis, inverse=1 - inverse)
    dx = dx / number if inverse else dx * number
    if shapes.known_dims(x)[-1] == 1:
        dx = op.Slice(dx, op.ints(0), op.ints(1), op.ints(-1))
    return (dx if length is None else _fitted(op, dx, count, op.size(x, at), at)), None, None


def _fitted(op: Builder, dx: Value, count: Value, size: Value, axis: int) -> Value:
    """``count`` elements along an axis as ``size``: what was cut off gets zeros, what was padded gets nothing."""
    dx = op.Slice(dx, op.ints(0), size, op.ints(axis))
    missing = op.Max(op.Sub(size, count), op.ints(0))
    return op.Pad(dx, op.Concat(op.ints(0), missing, axis=0), None, op.ints(axis))
