"""Gradients of batch and instance normalization."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("BatchNormTraining", domain=DOMAIN)
def batch_norm_training(ctx: Context, dy: Value | None, x: Value, scale: Value, *_: Value, **__: Any) -> Any:
    """One node, from the mean and inverse deviation that the forward pass gives; running statistics get none."""
    if dy is None:
        return None, None, None
    return ctx.op.BatchNormTrainingGrad(dy, x, scale, ctx.output(3), ctx.output(4), outputs=3)


@gradient("BatchNormalization")
def batch_normalization(
    ctx: Context,
    dy: Value | None,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    variance: Value,
    *,
    epsilon: float = 1e-5,
    training_mode: int = 0,
    momentum: float = 0.9,
    **_: Any,
) -> Any:
    """One node; mean and variance, where they are computed, get theirs from its sums.

    With w = scale / deviation: dmean = -w · dbias, dvariance = -w / (2 · deviation) · dscale.
    """
    op = ctx.op
    if training_mode:
        return _training_mode(ctx, dy, x, scale, mean, epsilon, momentum)
    dx, dscale, dbias = op.BatchNormalizationGrad(dy, x, scale, mean, variance, epsilon=epsilon, outputs=3)
    inv_std = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    w = inv_std * op.cast(scale, shapes.dtype_of(mean))
    sums = [op.cast(v, shapes.dtype_of(mean)) for v in (dscale, dbias)]
    return dx, dscale, dbias, -(w * sums[1]), w * inv_std * sums[0] * -0.5


def _training_mode(
    ctx: Context, dy: Value | None, x: Value, scale: Value, model: Value, epsilon: float, momentum: float
) -> tuple[Value | None, ...]:
    """The batch's statistics are computed again, as the operator does not give them.

    The new running statistics r' = momentum · r + (1 - momentum) · batch's hand on momentum · dr' to r and, with
    N elements in a channel, (1 - momentum) / N · (dmean' + 2 · (x - mean) · dvariance') to x.
    """
    op, kind = ctx.op, shapes.dtype_of(model)
    axes = op.ints(0, *range(2, shapes.rank(x)))
    wide = op.cast(x, kind)
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centred = wide - mean
    dx = dscale = dbias = None
    if dy is not None:
        variance = op.ReduceMean(centred * centred, axes, keepdims=0)
        inv_std = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
        dx, dscale, dbias = op.BatchNormTrainingGrad(dy, x, scale, op.Reshape(mean, op.ints(-1)), inv_std, outputs=3)
    dmean, dvariance = (*ctx.dys, None, None)[1:3]
    count = op.cast(op.share(x, mean), kind)
    for running, slope in ((dmean, None), (dvariance, centred * 2.0)):
        if running is not None:
            share = op.Reshape(running, op.shape(mean)) * (1.0 - momentum) / count
            share = op.Expand(share if slope is None else share * slope, op.shape(x))
            through = op.cast(share, shapes.dtype_of(x))
            dx = through if dx is None else dx + through
    return dx, dscale, dbias, *(None if g is None else g * momentum for g in (dmean, dvariance))


@gradient("InstanceNormalization")
def instance_normalization(
    ctx: Context, dy: Value, x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5
) -> Any:
    """One node, which computes the statistics again."""
    return ctx.op.InstanceNormalizationGrad(dy, x, scale, epsilon=epsilon, outputs=3)
