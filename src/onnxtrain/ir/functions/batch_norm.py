"""BatchNorm as PyTorch trains it: batch statistics, running statistics with the unbiased variance."""

from __future__ import annotations

from onnxscript import opset20 as op

from onnxtrain.ir.functions import function


@function(like=(0, 3, 4, 3, 3))
def BatchNormTraining(x, scale, bias, running_mean, running_var, epsilon: float = 1e-5, momentum: float = 0.1):
    """y, new running mean and variance, batch mean and inverse deviation of x (N, C, ...).

    new = (1 - momentum) * running + momentum * batch, as in torch (ONNX weighs the other way round).
    """
    flat = op.Reshape(x, op.Constant(value_ints=[0, 0, -1]))
    axes = op.Constant(value_ints=[0, 2])
    one = op.CastLike(op.Constant(value_float=1.0), scale)
    wide = op.CastLike(flat, scale)
    count = op.CastLike(op.Div(op.Size(x), op.Squeeze(op.Shape(x, start=1, end=2))), scale)
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centred = wide - mean
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    inv_std = one / op.Sqrt(variance + op.CastLike(op.Constant(value_float=epsilon), scale))
    channels = op.Constant(value_ints=[1, -1, 1])
    normal = centred * inv_std * op.Reshape(scale, channels) + op.Reshape(bias, channels)
    y = op.Reshape(op.CastLike(normal, x), op.Shape(x))
    rate = op.CastLike(op.Constant(value_float=momentum), running_mean)
    row = op.Constant(value_ints=[-1])
    batch_mean = op.Reshape(mean, row)
    unbiased = op.Reshape(variance, row) * count / (count - one)
    new_mean = running_mean + rate * (op.CastLike(batch_mean, running_mean) - running_mean)
    new_var = running_var + rate * (op.CastLike(unbiased, running_var) - running_var)
    return y, new_mean, new_var, batch_mean, op.Reshape(inv_std, row)


@function(like=(1, 2, 2))
def BatchNormTrainingGrad(dy, x, scale, mean, inv_std):
    """dx, dscale, dbias; with n = (x - mean) * inv_std: dx = scale * inv_std * (dy - mean(dy) - n * mean(dy * n))."""
    flat_shape = op.Constant(value_ints=[0, 0, -1])
    channels = op.Constant(value_ints=[1, -1, 1])
    axes = op.Constant(value_ints=[0, 2])
    g = op.CastLike(op.Reshape(dy, flat_shape), scale)
    factor = op.Reshape(inv_std, channels)
    n = (op.CastLike(op.Reshape(x, flat_shape), scale) - op.Reshape(mean, channels)) * factor
    centred = g - op.ReduceMean(g, axes, keepdims=1) - n * op.ReduceMean(g * n, axes, keepdims=1)
    dx = op.Reshape(op.CastLike(centred * factor * op.Reshape(scale, channels), x), op.Shape(x))
    return dx, op.ReduceSum(g * n, axes, keepdims=0), op.ReduceSum(g, axes, keepdims=0)
