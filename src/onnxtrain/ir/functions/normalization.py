"""Our operators for the gradients of normalizations, each of which computes its statistics again."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto, helper

from onnxtrain.ir.functions import function, op, own

VARIANCE_EPSILON = helper.make_tensor("", TensorProto.DOUBLE, [], [1e-9])


@function(like=(1, 2, 2))
def GroupNormalizationGrad(dy, x, scale, num_groups: int, epsilon: float = 1e-05):
    """Gradient of GroupNormalization: dx, dscale, dbias; scale has a number for each channel, or for each group.

    With n = (x - mean) * inv_std of each group and g = dy * scale: dx = inv_std * (g - mean(g) - n * mean(g * n)).
    """
    minus_one, last = op.Constant(value_ints=[-1]), op.Constant(value_ints=[2])
    planes = op.Constant(value_ints=[0, 0, -1])
    zero = op.Constant(value_ints=[0])
    groups = op.Concat(zero, op.Reshape(op.Constant(value_int=num_groups), minus_one), minus_one, axis=0)
    flat = op.Reshape(x, groups)
    centred = flat - op.ReduceMean(flat, last, keepdims=1)
    variance = op.ReduceMean(centred * centred, last, keepdims=1)
    inv_std = op.Reciprocal(op.Sqrt(variance + op.CastLike(op.Constant(value_float=epsilon), x)))
    n = centred * inv_std
    copies = op.Concat(op.Shape(scale), op.Shape(x, start=1, end=2) / op.Shape(scale), axis=0)
    factor = op.Expand(op.Unsqueeze(scale, minus_one), copies)
    channels = op.Reshape(dy, planes)
    g = op.Reshape(channels * op.Reshape(factor, op.Constant(value_ints=[1, -1, 1])), groups)
    dx = inv_std * (g - op.ReduceMean(g, last, keepdims=1) - n * op.ReduceMean(g * n, last, keepdims=1))
    over = op.Constant(value_ints=[0, 2])
    dscale = op.ReduceSum(channels * op.Reshape(n, op.Shape(channels)), over, keepdims=0)
    dbias = op.ReduceSum(channels, over, keepdims=0)
    column = op.Constant(value_ints=[1])
    return (
        op.Reshape(dx, op.Shape(x)),
        op.ReduceSum(op.Reshape(dscale, copies), column, keepdims=0),
        op.ReduceSum(op.Reshape(dbias, copies), column, keepdims=0),
    )


@function(like=(0,))
def RMSNorm(x, scale, axis: int = -1, epsilon: float = 1e-05):
    """``x / sqrt(mean(x * x) + epsilon) * scale``, the mean over the axes from one on (Zhang and Sennrich, 2019)."""
    total = op.Size(op.Shape(x))
    first = op.Mod(op.Constant(value_int=axis) + total, total)
    square = op.ReduceMean(x * x, op.Range(first, total, op.Constant(value_int=1)), keepdims=1)
    return x * op.Reciprocal(op.Sqrt(square + op.CastLike(op.Constant(value_float=epsilon), x))) * scale


@function(like=(1, 2))
def RMSNormalizationGrad(dy, x, scale, axis: int = -1, epsilon: float = 1e-05):
    """Gradient of RMSNormalization: dx, dscale.

    With n = x * inv_rms and g = dy * scale: dx = inv_rms * (g - n * mean(g * n)).
    """
    total = op.Size(op.Shape(x))
    first = op.Mod(op.Constant(value_int=axis) + total, total)
    normalized = op.Range(first, total, op.Constant(value_int=1))
    square = op.ReduceMean(x * x, normalized, keepdims=1)
    inv_rms = op.Reciprocal(op.Sqrt(square + op.CastLike(op.Constant(value_float=epsilon), x)))
    n = x * inv_rms
    g = dy * scale
    dx = inv_rms * (g - n * op.ReduceMean(g * n, normalized, keepdims=1))
    return dx, own.SumToShape(dy * n, op.Shape(scale))


@function(like=(1,))
def MeanVarianceNormalizationGrad(dy, x, axes: Sequence[int]):
    """Gradient of MeanVarianceNormalization, c / (s + 1e-9) with c = x - mean and s = sqrt(mean(c * c)).

    dc = (dy - c * mean(dy * c) / (s * (s + 1e-9))) / (s + 1e-9), and dx = dc - mean(dc). The term of the variance is 0
    where the variance is.
    """
    over = op.Constant(value_ints=axes)
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    c = x - op.ReduceMean(x, over, keepdims=1)
    s = op.Sqrt(op.ReduceMean(c * c, over, keepdims=1))
    divisor = s + op.CastLike(op.Constant(value=VARIANCE_EPSILON), x)
    flat = op.Equal(s, zero)
    slope = op.ReduceMean(dy * c, over, keepdims=1) / (op.Where(flat, one, s) * divisor)
    dc = (dy - c * op.Where(flat, zero, slope)) / divisor
    return dc - op.ReduceMean(dc, over, keepdims=1)


@function(like=(0,))
def ChannelWindowSum(x, before, size: int):
    """Sums over ``size`` neighbouring channels, of which ``before`` (a vector of one) come before the channel itself.

    x is (batch, channels, spatial...); a convolution with ones along the channels.
    """
    one, zero = op.Constant(value_ints=[1]), op.Constant(value_ints=[0])
    width = op.Reshape(op.Constant(value_int=size), one)
    planes = op.Reshape(x, op.Concat(zero, one, op.Shape(x, start=1, end=2), op.Constant(value_ints=[-1]), axis=0))
    pads = op.Concat(before, width - one - before, axis=0)
    framed = op.Pad(planes, pads, op.CastLike(op.Constant(value_float=0.0), x), op.Constant(value_ints=[2]))
    kernel = op.Expand(op.CastLike(op.Constant(value_float=1.0), x), op.Concat(one, one, width, one, axis=0))
    return op.Reshape(op.Conv(framed, kernel), op.Shape(x))


@function(like=(1,))
def LRNGrad(dy, x, size: int, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0):
    """Gradient of LRN, x * base^-beta with base = bias + alpha / size * (sum of squares of neighbouring channels).

    dx = dy * base^-beta - 2 alpha beta / size * x * (sum of dy * x * base^(-beta - 1) over the channels whose
    neighbour this one is).
    """
    one, two = op.Constant(value_ints=[1]), op.Constant(value_ints=[2])
    width = op.Reshape(op.Constant(value_int=size), one)
    before = (width - one) / two
    share = op.CastLike(op.Constant(value_float=alpha), x) / op.CastLike(op.Constant(value_int=size), x)
    power = op.CastLike(op.Constant(value_float=beta), x)
    base = op.CastLike(op.Constant(value_float=bias), x) + share * own.ChannelWindowSum(x * x, before, size=size)
    scaled = dy * op.Pow(base, op.Neg(power))
    spread = own.ChannelWindowSum(scaled * x / base, width - one - before, size=size)
    return scaled - op.CastLike(op.Constant(value_float=2.0), x) * share * power * x * spread
