"""Our operators that change shapes."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op


@function()
def SumToShape(x, shape):
    """Undo broadcasting: sum x over the axes along which ``shape`` was expanded to x's shape."""
    full = op.Shape(x)
    missing = op.Size(full) - op.Size(shape)
    padded = op.Concat(op.Expand(op.Constant(value_ints=[1]), op.Reshape(missing, [1])), shape, axis=0)
    expanded = op.Not(op.Equal(padded, full))
    axes = op.Reshape(op.NonZero(expanded), [-1])
    total = op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(total, shape, allowzero=1)


@function()
def SliceGrad(dy, shape, starts, ends, axes, steps):
    """Gradient of Slice: dy at its place in zeros of that shape, by the positions that the same slice takes."""
    minus_one = op.Constant(value_ints=[-1])
    count = op.ReduceProd(shape, keepdims=0)
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    taken = op.Slice(op.Reshape(numbers, shape, allowzero=1), starts, ends, axes, steps)
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), dy), op.Reshape(count, minus_one))
    placed = op.ScatterElements(zeros, op.Reshape(taken, minus_one), op.Reshape(dy, minus_one), axis=0)
    return op.Reshape(placed, shape, allowzero=1)


@function()
def PadGrad(dy, shape, pads, mode: str = "reflect"):
    """Gradient of Pad in a mode that repeats x: dy added at the positions that the same padding takes of x.

    ``pads`` holds the padding before each axis, then after each.
    """
    minus_one = op.Constant(value_ints=[-1])
    count = op.ReduceProd(shape, keepdims=0)
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    taken = op.Pad(op.Reshape(numbers, shape, allowzero=1), pads, mode=mode)
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), dy), op.Reshape(count, minus_one))
    summed = op.ScatterElements(zeros, op.Reshape(taken, minus_one), op.Reshape(dy, minus_one), axis=0, reduction="add")
    return op.Reshape(summed, shape, allowzero=1)
