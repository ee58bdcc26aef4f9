"""Our operators for batch and instance normalization.

x has shape (batch, channels, spatial...), all else one number for each channel.
"""

from __future__ import annotations

from onnxtrain.ir.functions import function, op


@function(like=(0, 3, 4, 3, 4))
def BatchNormTraining(x, scale, bias, running_mean, running_var, epsilon: float = 1e-05, momentum: float = 0.1):
    """Normalization by the batch's own mean and variance, as torch does it in training mode.

    Returns y, the new running mean and variance, (1 - momentum) * old + momentum * batch with the unbiased variance,
    and the batch's mean and inverse standard deviation (of the biased variance), which the gradient needs.
    """
    over = op.Constant(value_ints=[0, 2])
    flat = op.CastLike(op.Reshape(x, op.Constant(value_ints=[0, 0, -1])), running_mean)
    mean = op.ReduceMean(flat, over, keepdims=1)
    centred = flat - mean
    variance = op.ReduceMean(centred * centred, over, keepdims=1)
    inv_std = op.Reciprocal(op.Sqrt(variance + op.CastLike(op.Constant(value_float=epsilon), running_mean)))
    column = op.Constant(value_ints=[-1, 1])
    factor = op.CastLike(op.Reshape(scale, column), running_mean)
    y = centred * inv_std * factor + op.CastLike(op.Reshape(bias, column), running_mean)
    count = op.CastLike(op.Size(x), running_mean) / op.CastLike(op.Size(running_mean), running_mean)
    new = op.CastLike(op.Constant(value_float=momentum), running_mean)
    one = op.CastLike(op.Constant(value_float=1.0), running_mean)
    save_mean = op.Squeeze(mean, over)
    unbiased = op.Squeeze(variance, over) * (count / (count - one))
    new_mean = running_mean * (one - new) + save_mean * new
    new_var = running_var * (one - new) + unbiased * new
    return op.Reshape(op.CastLike(y, x), op.Shape(x)), new_mean, new_var, save_mean, op.Squeeze(inv_std, over)


@function(like=(1, 2, 2))
def BatchNormTrainingGrad(dy, x, scale, save_mean, save_inv_std):
    """Gradient of BatchNormTraining: dx, dscale, dbias.

    With n = (x - mean) * inv_std: dx = scale * inv_std * (dy - mean(dy) - n * mean(dy * n)).
    """
    over = op.Constant(value_ints=[0, 2])
    column, flat_shape = op.Constant(value_ints=[-1, 1]), op.Constant(value_ints=[0, 0, -1])
    g = op.CastLike(op.Reshape(dy, flat_shape), save_mean)
    centred = op.CastLike(op.Reshape(x, flat_shape), save_mean) - op.Reshape(save_mean, column)
    n = centred * op.Reshape(save_inv_std, column)
    inner = g - op.ReduceMean(g, over, keepdims=1) - n * op.ReduceMean(g * n, over, keepdims=1)
    dx = inner * op.Reshape(save_inv_std * op.CastLike(scale, save_mean), column)
    dscale = op.CastLike(op.ReduceSum(g * n, over, keepdims=0), scale)
    dbias = op.CastLike(op.ReduceSum(g, over, keepdims=0), scale)
    return op.Reshape(op.CastLike(dx, x), op.Shape(x)), dscale, dbias


@function(like=(1, 2, 2))
def BatchNormalizationGrad(dy, x, scale, mean, variance, epsilon: float = 1e-05):
    """Gradient of BatchNormalization by given statistics, which are constants: dx, dscale, dbias."""
    over = op.Constant(value_ints=[0, 2])
    column, flat_shape = op.Constant(value_ints=[-1, 1]), op.Constant(value_ints=[0, 0, -1])
    inv_std = op.Reciprocal(op.Sqrt(variance + op.CastLike(op.Constant(value_float=epsilon), variance)))
    g = op.CastLike(op.Reshape(dy, flat_shape), mean)
    n = (op.CastLike(op.Reshape(x, flat_shape), mean) - op.Reshape(mean, column)) * op.Reshape(inv_std, column)
    dx = g * op.Reshape(inv_std * op.CastLike(scale, mean), column)
    dscale = op.CastLike(op.ReduceSum(g * n, over, keepdims=0), scale)
    dbias = op.CastLike(op.ReduceSum(g, over, keepdims=0), scale)
    return op.Reshape(op.CastLike(dx, x), op.Shape(x)), dscale, dbias


@function(like=(1, 2, 2))
def InstanceNormalizationGrad(dy, x, scale, epsilon: float = 1e-05):
    """Gradient of InstanceNormalization, its statistics computed again: dx, dscale, dbias; formula as above."""
    within, over = op.Constant(value_ints=[2]), op.Constant(value_ints=[0, 2])
    flat_shape = op.Constant(value_ints=[0, 0, -1])
    flat, g = op.Reshape(x, flat_shape), op.Reshape(dy, flat_shape)
    centred = flat - op.ReduceMean(flat, within, keepdims=1)
    variance = op.ReduceMean(centred * centred, within, keepdims=1)
    inv_std = op.Reciprocal(op.Sqrt(variance + op.CastLike(op.Constant(value_float=epsilon), x)))
    n = centred * inv_std
    inner = g - op.ReduceMean(g, within, keepdims=1) - n * op.ReduceMean(g * n, within, keepdims=1)
    dx = inner * inv_std * op.Reshape(scale, op.Constant(value_ints=[-1, 1]))
    return op.Reshape(dx, op.Shape(x)), op.ReduceSum(g * n, over, keepdims=0), op.ReduceSum(g, over, keepdims=0)
