"""Our operator for the gradient of convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from onnxscript import opset20 as op
from onnxscript import values

from onnxtrain.ir.functions import DOMAIN, VERSION, function

own = values.Opset(DOMAIN, VERSION)


@function()
def PlaceAt(x, before, sizes):
    """The spatial part of x (axes from 2 on) moved by ``before`` into zeros of ``sizes``; what falls outside is cut."""
    after = sizes - op.Shape(x, start=2) - before
    none = op.Constant(value_ints=[0, 0])
    pads = op.Concat(none, before, none, after, axis=0)
    return op.Pad(x, pads, op.CastLike(op.Constant(value_float=0.0), x))


@function()
def ConvWeightGrad(dy, x, w, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], group: int = 1):
    """Gradient of a convolution's weight, itself a convolution: batch and channels exchanged, steps and dilations too.

    The batch becomes the channels that are summed over, dy the kernel; each group keeps its own channels.
    """
    zero, minus_one = op.Constant(value_ints=[0]), op.Constant(value_ints=[-1])
    groups = op.Reshape(op.Constant(value_int=group), minus_one)
    batch, spatial = op.Shape(x, start=0, end=1), op.Shape(x, start=2)
    parts = op.Reshape(x, op.Concat(zero, groups, op.Shape(w, start=1, end=2), minus_one, axis=0))
    data_shape = op.Concat(op.Shape(w, start=1, end=2), groups * batch, spatial, axis=0)
    data = op.Reshape(op.Transpose(parts, perm=[2, 1, 0, 3]), data_shape)
    rows = op.Transpose(op.Reshape(dy, op.Constant(value_ints=[0, 0, -1])), perm=[1, 0, 2])
    kernel = op.Reshape(rows, op.Concat(op.Shape(w, start=0, end=1), batch, op.Shape(dy, start=2), axis=0))
    wide = op.Conv(data, kernel, strides=dilations, dilations=strides, pads=pads, group=group)
    made = own.PlaceAt(wide, op.Shape(w, start=2) * op.Constant(value_int=0), op.Shape(w, start=2))
    flat = op.Transpose(op.Reshape(made, op.Constant(value_ints=[0, 0, -1])), perm=[1, 0, 2])
    return op.Reshape(flat, op.Shape(w))


@function()
def ConvGrad(dy, x, w, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], group: int = 1):
    """Gradients of Conv: dx, dw, and db, the sum of dy for each channel.

    dx is a transposed convolution without padding, of which the part that lies over x is taken: where the steps do
    not divide x's size, its last elements were in no window, or only in the padding's.
    """
    full = op.ConvTranspose(dy, w, strides=strides, dilations=dilations, group=group)
    sizes = op.Shape(x, start=2)
    before = op.Neg(op.Slice(op.Constant(value_ints=pads), op.Constant(value_ints=[0]), op.Shape(sizes)))
    dx = own.PlaceAt(full, before, sizes)
    dw = own.ConvWeightGrad(dy, x, w, strides=strides, pads=pads, dilations=dilations, group=group)
    db = op.ReduceSum(op.Reshape(dy, op.Constant(value_ints=[0, 0, -1])), op.Constant(value_ints=[0, 2]), keepdims=0)
    return dx, dw, db
