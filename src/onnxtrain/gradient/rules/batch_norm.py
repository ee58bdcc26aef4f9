"""Gradients of batch and instance normalization."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("BatchNormTraining", domain=DOMAIN)
def batch_norm_training(ctx: Context, dy: Value, x: Value, scale: Value, *_: Value, **__: Any) -> Any:
    """One node, from the mean and inverse deviation that the forward pass gives; running statistics get none."""
    return ctx.op.BatchNormTrainingGrad(dy, x, scale, ctx.output(3), ctx.output(4), outputs=3)


@gradient("BatchNormalization")
def batch_normalization(
    ctx: Context,
    dy: Value,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    variance: Value,
    *,
    epsilon: float = 1e-5,
    training_mode: int = 0,
    **_: Any,
) -> Any:
    """One node; mean and variance, where they are computed, get theirs from its sums.

    With w = scale / deviation: dmean = -w · dbias, dvariance = -w / (2 · deviation) · dscale. In training mode the
    batch's statistics are computed again, as the operator does not give them.
    """
    op = ctx.op
    if training_mode:
        return op.BatchNormTrainingGrad(dy, x, scale, *_batch_statistics(ctx, x, mean, epsilon), outputs=3)
    dx, dscale, dbias = op.BatchNormalizationGrad(dy, x, scale, mean, variance, epsilon=epsilon, outputs=3)
    inv_std = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    w = inv_std * op.cast(scale, shapes.dtype_of(mean))
    sums = [op.cast(v, shapes.dtype_of(mean)) for v in (dscale, dbias)]
    return dx, dscale, dbias, -(w * sums[1]), w * inv_std * sums[0] * -0.5


def _batch_statistics(ctx: Context, x: Value, model: Value, epsilon: float) -> tuple[Value, Value]:
    """Mean and inverse deviation of each channel, in the model's type."""
    op, axes = ctx.op, ctx.op.ints(0, *range(2, shapes.rank(x)))
    wide = op.cast(x, shapes.dtype_of(model))
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centred = wide - mean
    variance = op.ReduceMean(centred * centred, axes, keepdims=0)
    return op.Reshape(mean, op.ints(-1)), op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))


@gradient("InstanceNormalization")
def instance_normalization(
    ctx: Context, dy: Value, x: Value, scale: Value, bias: Value, *, epsilon: float = 1e-5
) -> Any:
    """One node, which computes the statistics again."""
    return ctx.op.InstanceNormalizationGrad(dy, x, scale, epsilon=epsilon, outputs=3)
