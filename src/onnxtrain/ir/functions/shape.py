"""Our operators that change shapes."""

from __future__ import annotations

from onnxscript import opset20 as op

from onnxtrain.ir.functions import function


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
