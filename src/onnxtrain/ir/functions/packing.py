"""Rows without padding: taken out of a padded tensor, put back into one.

Rows are numbered as in the flattened first axes of the padded tensor: row ``b * s + p`` is position p of sequence b.
Row numbers are ascending and without duplicates.
"""

from __future__ import annotations

from onnxscript import opset20 as op
from onnxscript import values

from onnxtrain.ir.functions import DOMAIN, VERSION, function

own = values.Opset(DOMAIN, VERSION)


@function()
def ShrunkenGather(x, indices):
    """Rows of x (N, ...) at the indices (T): (T, ...)."""
    return op.Gather(x, indices, axis=0)


@function()
def ShrunkenGatherGrad(dy, indices, shape):
    """Gradient of ShrunkenGather: zeros of that shape with the rows of dy (T, ...) at the indices (T)."""
    zeros = op.Expand(op.CastLike(op.Constant(value_int=0), dy), shape)
    ones = op.Expand(op.Constant(value_ints=[1]), op.Shape(op.Shape(dy, start=1)))
    places = op.Reshape(indices, op.Concat(op.Shape(indices), ones, axis=0), allowzero=1)
    return op.ScatterElements(zeros, op.Expand(places, op.Shape(dy)), dy, axis=0)


@function()
def FlattenAndUnpad(x, rows):
    """The rows (T) of x (B, S, ...), flattened to (B * S, ...): (T, ...); and the sizes (B, S)."""
    sizes = op.Shape(x, start=0, end=2)
    flat = op.Concat(op.ReduceProd(sizes, keepdims=1), op.Shape(x, start=2), axis=0)
    return own.ShrunkenGather(op.Reshape(x, flat, allowzero=1), rows), sizes


@function()
def PadAndUnflatten(x, rows, shape):
    """x (T, ...) at the rows (T) of zeros with the first two sizes ``shape`` = (B, S): (B, S, ...)."""
    rest = op.Shape(x, start=1)
    flat = own.ShrunkenGatherGrad(x, rows, op.Concat(op.ReduceProd(shape, keepdims=1), rest, axis=0))
    return op.Reshape(flat, op.Concat(shape, rest, axis=0), allowzero=1)
