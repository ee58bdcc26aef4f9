"""Our operators for the gradients of convolution and pooling, in any number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from onnxscript import opset20 as op
from onnxscript import values

from onnxtrain.ir.functions import DOMAIN, VERSION, function

own = values.Opset(DOMAIN, VERSION)


@function(like=(2,))
def CutWindow(full, pads, x):
    """What lies over x in a full transposed convolution: padding cut off in front, zeros where no window reached."""
    two = op.Constant(value_ints=[2])
    end = op.Constant(value_ints=[9223372036854775807])
    rank = op.Size(op.Shape(x))
    axes = op.Range(op.Constant(value_int=2), rank, op.Constant(value_int=1))
    before = op.Slice(pads, op.Constant(value_ints=[0]), op.Reshape(rank, op.Constant(value_ints=[1])) - two)
    stop = before + op.Slice(op.Shape(x), two, end)
    missing = op.Max(stop - op.Slice(op.Shape(full), two, end), before - before)
    zero = op.CastLike(op.Constant(value_float=0.0), full)
    wide = op.Pad(full, op.Concat(missing - missing, missing, axis=0), zero, axes)
    return op.Slice(wide, before, stop, axes)


@function(like=(1, 2))
def ConvGrad(dy, x, w, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], group: int = 1):
    """Gradients of Conv: dx by ConvTranspose, dw by a Conv over the batch, dbias by a sum.

    For dw the batch takes the place of the channels: x as (C/group, group·N, ...) is convolved with dy as (M, N, ...),
    strides and dilations exchanged; what the kernel does not reach is cut off.
    """
    two = op.Constant(value_ints=[2])
    end = op.Constant(value_ints=[9223372036854775807])
    minus_one = op.Constant(value_ints=[-1])
    axes = op.Range(op.Constant(value_int=2), op.Size(op.Shape(w)), op.Constant(value_int=1))
    full = op.ConvTranspose(dy, w, strides=strides, dilations=dilations, group=group)
    dx = own.CutWindow(full, op.Constant(value_ints=pads), x)

    groups = op.Reshape(op.Constant(value_int=group), minus_one)
    batch = op.Shape(x, start=0, end=1)
    per_group = op.Shape(w, start=1, end=2)
    features = op.Shape(w, start=0, end=1)
    spatial = op.Slice(op.Shape(x), two, end)
    grouped = op.Reshape(x, op.Concat(batch, groups, per_group, minus_one, axis=0))
    moved = op.Transpose(grouped, perm=[2, 1, 0, 3])
    channels = op.Reshape(moved, op.Concat(per_group, groups * batch, spatial, axis=0))
    flat = op.Reshape(dy, op.Concat(batch, features, minus_one, axis=0))
    kernels = op.Reshape(
        op.Transpose(flat, perm=[1, 0, 2]), op.Concat(features, batch, op.Slice(op.Shape(dy), two, end), axis=0)
    )
    wide = op.Conv(channels, kernels, strides=dilations, pads=pads, dilations=strides, group=group)
    size = op.Slice(op.Shape(wide), two, end)
    turned = op.Transpose(op.Reshape(wide, op.Concat(per_group, features, minus_one, axis=0)), perm=[1, 0, 2])
    shaped = op.Reshape(turned, op.Concat(features, per_group, size, axis=0))
    window = op.Slice(op.Shape(w), two, end)
    dw = op.Slice(shaped, window - window, window, axes)
    dbias = op.ReduceSum(flat, op.Constant(value_ints=[0, 2]), keepdims=0)
    return dx, dw, dbias


@function()
def MaxPoolGrad(dy, indices, shape):
    """Gradient of MaxPool: dy added at the flat indices that the forward pass gives."""
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), dy), op.ReduceProd(shape, keepdims=1))
    minus_one = op.Constant(value_ints=[-1])
    summed = op.ScatterElements(zeros, op.Reshape(indices, minus_one), op.Reshape(dy, minus_one), reduction="add")
    return op.Reshape(summed, shape)


@function(like=(1,))
def AveragePoolGrad(
    dy, x, kernel_shape: Sequence[int], strides: Sequence[int], pads: Sequence[int], count_include_pad: int = 0
):
    """Gradient of AveragePool: dy divided by the number of elements averaged, spread over each window."""
    two = op.Constant(value_ints=[2])
    end = op.Constant(value_ints=[9223372036854775807])
    minus_one = op.Constant(value_ints=[-1])
    ones = op.Constant(value_ints=[1, 1])
    one = op.CastLike(op.Constant(value_float=1.0), dy)
    window = op.Constant(value_ints=kernel_shape)
    kernel = op.Expand(one, op.Concat(ones, window, axis=0))
    plane = op.Expand(one, op.Concat(ones, op.Slice(op.Shape(x), two, end), axis=0))
    inside = op.Conv(plane, kernel, strides=strides, pads=pads)
    included = op.CastLike(op.Constant(value_int=count_include_pad), dy)
    count = included * op.CastLike(op.ReduceProd(window, keepdims=0), dy) + (one - included) * inside
    share = op.Reshape(
        dy / count, op.Concat(minus_one, op.Constant(value_ints=[1]), op.Slice(op.Shape(dy), two, end), axis=0)
    )
    full = op.ConvTranspose(share, kernel, strides=strides)
    spatial = op.Concat(op.Shape(x, start=0, end=2), op.Slice(op.Shape(full), two, end), axis=0)
    return own.CutWindow(op.Reshape(full, spatial), op.Constant(value_ints=pads), x)
