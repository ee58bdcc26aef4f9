"""Our operators for the gradients of pooling."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.ir.functions import function, op, own


@function()
def MaxPoolGrad(dy, indices, shape):
    """Gradient of MaxPool: dy added at its indices, which count through the whole operand of that shape."""
    minus_one = op.Constant(value_ints=[-1])
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), dy), op.ReduceProd(shape, keepdims=1))
    summed = op.ScatterElements(
        zeros, op.Reshape(indices, minus_one), op.Reshape(dy, minus_one), axis=0, reduction="add"
    )
    return op.Reshape(summed, shape, allowzero=1)


@function()
def AveragedElements(
    dy,
    sizes,
    before,
    after,
    strides: Sequence[int],
    dilations: Sequence[int],
    kernel_shape: Sequence[int],
    count_include_pad: int = 0,
):
    """How many elements each mean of an average pooling is taken over: shape (1, 1, spatial of dy)."""
    one = op.CastLike(op.Constant(value_float=1.0), dy)
    pair = op.Constant(value_ints=[1, 1])
    counted = op.Constant(value_int=count_include_pad)
    inside = op.Expand(one, op.Concat(pair, sizes + counted * (before + after), axis=0))
    steps, unit = op.Constant(value_ints=strides), op.Constant(value_int=1)
    reach = (op.Constant(value_ints=kernel_shape) - unit) * op.Constant(value_ints=dilations) + unit
    used = (op.Shape(dy, start=2) - unit) * steps + reach
    framed = own.PlaceAt(inside, before * (unit - counted), used)
    kernel = op.Expand(one, op.Concat(pair, op.Constant(value_ints=kernel_shape), axis=0))
    return op.Conv(framed, kernel, strides=strides, dilations=dilations)


@function()
def SumPoolGrad(dy, shape, pads, kernel_shape: Sequence[int], strides: Sequence[int], dilations: Sequence[int]):
    """Gradient of sums over windows: dy spread back by a transposed convolution of ones.

    Args are dy, the operand's shape, and its padding: before each spatial axis, then after each.
    """
    one = op.CastLike(op.Constant(value_float=1.0), dy)
    sizes = op.Slice(shape, op.Constant(value_ints=[2]), op.Shape(shape))
    before = op.Slice(pads, op.Constant(value_ints=[0]), op.Shape(sizes))
    planes_shape = op.Concat(op.Constant(value_ints=[-1, 1]), op.Shape(dy, start=2), axis=0)
    kernel_dims = op.Concat(op.Constant(value_ints=[1, 1]), op.Constant(value_ints=kernel_shape), axis=0)
    kernel = op.Expand(one, kernel_dims)
    full = op.ConvTranspose(op.Reshape(dy, planes_shape), kernel, strides=strides, dilations=dilations)
    return op.Reshape(own.PlaceAt(full, op.Neg(before), sizes), shape)


@function()
def AveragePoolGrad(
    dy,
    shape,
    pads,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    count_include_pad: int = 0,
):
    """Gradient of AveragePool: that of sums over windows, of dy over the number of its elements; args as there."""
    sizes = op.Slice(shape, op.Constant(value_ints=[2]), op.Shape(shape))
    half = op.Shape(sizes)
    before = op.Slice(pads, op.Constant(value_ints=[0]), half)
    after = op.Slice(pads, half, half + half)
    count = own.AveragedElements(
        dy,
        sizes,
        before,
        after,
        strides=strides,
        dilations=dilations,
        kernel_shape=kernel_shape,
        count_include_pad=count_include_pad,
    )
    return own.SumPoolGrad(dy / count, shape, pads, kernel_shape=kernel_shape, strides=strides, dilations=dilations)
