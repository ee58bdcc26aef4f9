"""Gradients of normalizations and losses."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("LayerNormalization")
def layer_normalization(
    ctx: Context, dy: Value, x: Value, scale: Value, bias: Value | None = None, *, axis: int = -1, **_: Any
) -> Any:
    """One node, from the mean and inverse deviation that the forward pass gives."""
    ctx.first_output_only()
    return ctx.op.LayerNormalizationGrad(dy, x, scale, ctx.output(1), ctx.output(2), axis=axis, outputs=3)


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    ctx: Context,
    dy: Value,
    scores: Value,
    labels: Value,
    weights: Value | None = None,
    *,
    reduction: str = "mean",
    ignore_index: Any = None,
) -> Any:
    """dlosses · (softmax(scores) - onehot(labels)), from the log probabilities that the forward pass gives."""
    ctx.first_output_only()
    dlosses = _per_label(ctx, dy, scores, labels, weights, reduction, ignore_index)
    return ctx.op.SoftmaxCrossEntropyLossGrad(dlosses, ctx.output(1), labels), None, None


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    ctx: Context,
    dy: Value,
    log_prob: Value,
    labels: Value,
    weights: Value | None = None,
    *,
    reduction: str = "mean",
    ignore_index: Any = None,
) -> Any:
    """-dlosses at the labels."""
    dlosses = _per_label(ctx, dy, log_prob, labels, weights, reduction, ignore_index)
    return ctx.op.NegativeLogLikelihoodLossGrad(dlosses, log_prob, labels), None, None


def _per_label(
    ctx: Context, dy: Value, scores: Value, labels: Value, weights: Value | None, reduction: str, ignore: Any
) -> Value:
    """The gradient of each label's own loss: weighted, divided as the reduction says, 0 for ignored labels."""
    op = ctx.op
    share = op.Expand(op.like(1.0, scores), op.shape(labels))
    if ignore is not None:
        kept = op.Not(op.Equal(labels, op.constant(ignore, shapes.dtype_of(labels))))
        share = op.cast(kept, shapes.dtype_of(scores))
    if weights is not None:
        zero = op.constant(0, shapes.dtype_of(labels))
        safe = labels if ignore is None else op.Where(kept, labels, zero)
        share = share * op.Gather(weights, safe)
    if reduction == "mean":
        dy = dy / op.ReduceSum(share, keepdims=0)
    return share * dy
