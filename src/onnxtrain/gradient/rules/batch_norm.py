"""Gradients of batch normalization."""

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
    """One node; in training mode the batch's statistics are computed again, as the operator does not give them."""
    op = ctx.op
    if not training_mode:
        return op.BatchNormalizationGrad(dy, x, scale, mean, variance, epsilon=epsilon, outputs=3)
    axes = op.ints(0, *range(2, shapes.rank(x)))
    wide = op.cast(x, shapes.dtype_of(mean))
    kept = op.ReduceMean(wide, axes, keepdims=1)
    centred = wide - kept
    inv_std = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(centred * centred, axes, keepdims=0), epsilon)))
    return op.BatchNormTrainingGrad(dy, x, scale, op.Reshape(kept, op.ints(-1)), inv_std, outputs=3)
