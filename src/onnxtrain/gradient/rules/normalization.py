"""Gradients of normalizations and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder

Value = ir.Value


_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@gradient("LayerNormalization")
def layer_normalization(
    ctx: Context,
    dy: Value | None,
    x: Value,
    scale: Value,
    bias: Value | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    **_: Any,
) -> Any:
    """One node, from the mean and inverse deviation that the forward pass gives; their own gradients are added.

    Of doubles it gives them in single precision (ONNX's ``stash_type``), so they are computed again.

    dmean adds dmean / N to dx, and d(inverse deviation) adds -d / N · inverse deviation³ · (x - mean).
    """
    op, double = ctx.op, ir.DataType.DOUBLE
    kind = double if shapes.dtype_of(x) == double else ir.DataType.FLOAT
    mean, inv_std = ctx.output(1), ctx.output(2)
    if kind == double != shapes.dtype_of(mean):
        mean, inv_std = _statistics(op, x, axis, epsilon)
    mean, inv_std = op.cast(mean, kind), op.cast(inv_std, kind)
    through_y: tuple[Value | None, ...] = (None, None, None)
    if dy is not None:
        through_y = op.LayerNormalizationGrad(dy, x, scale, mean, inv_std, axis=axis, outputs=3)
    dmean, dinv = (None if d is None else op.cast(d, kind) for d in (*ctx.dys, None, None)[1:3])
    if dmean is None and dinv is None:
        return through_y
    count = op.cast(op.share(x, mean), kind)
    slope = op.like(0.0, mean) if dmean is None else dmean / count
    if dinv is not None:
        slope = slope - (op.cast(x, kind) - mean) * (dinv * inv_std * inv_std * inv_std / count)
    dx = op.cast(op.Expand(slope, op.shape(x)), shapes.dtype_of(x))
    return (dx if through_y[0] is None else through_y[0] + dx), *through_y[1:]


def _statistics(op: Builder, x: Value, axis: int, epsilon: float) -> tuple[Value, Value]:
    """Mean and inverse deviation over the axes from one on, in the type of x."""
    axes = op.ints(*range(axis % shapes.rank(x), shapes.rank(x)))
    mean = op.ReduceMean(x, axes, keepdims=1)
    off = x - mean
    return mean, op.Reciprocal(op.Sqrt(op.ReduceMean(off * off, axes, keepdims=1) + epsilon))


@gradient("RMSNorm", domain=DOMAIN)
@gradient("RMSNormalization")
def rms_normalization(
    ctx: Context, dy: Value, x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> Any:
    """One node, in float32 at least."""
    wide = _widened(ctx.op, dy, x, scale)
    made = ctx.op.RMSNormalizationGrad(*wide, axis=axis, epsilon=epsilon, outputs=2)
    return tuple(ctx.op.cast(g, shapes.dtype_of(v)) for g, v in zip(made, (x, scale), strict=True))


@gradient("GroupNormalization")
def group_normalization(
    ctx: Context, dy: Value, x: Value, scale: Value, bias: Value, *, num_groups: int, epsilon: float = 1e-5, **_: Any
) -> Any:
    """One node, in float32 at least; it knows scales of groups (opset 18) and of channels (21)."""
    wide = _widened(ctx.op, dy, x, scale)
    made = ctx.op.GroupNormalizationGrad(*wide, num_groups=num_groups, epsilon=epsilon, outputs=3)
    return tuple(ctx.op.cast(g, shapes.dtype_of(v)) for g, v in zip(made, (x, scale, bias), strict=True))


def _widened(op: Builder, *values: Value) -> tuple[Value, ...]:
    """Half precision as float32: squares would overflow and sums lose their digits."""
    return tuple(op.cast(v, ir.DataType.FLOAT) if v.dtype in _HALF else v for v in values)


@gradient("MeanVarianceNormalization")
def mean_variance_normalization(ctx: Context, dy: Value, x: Value, *, axes: Sequence[int] = (0, 2, 3)) -> Any:
    """One node, which computes the statistics again."""
    return ctx.op.MeanVarianceNormalizationGrad(dy, x, axes=tuple(axes))


@gradient("LpNormalization")
def lp_normalization(ctx: Context, dy: Value, x: Value, *, axis: int = -1, p: int = 2) -> Any:
    """(dy - d Σ dy·y) / norm with d, the slope of the norm, y for p = 2 and sign(x) for 1; 0 where the norm is 0."""
    op, y, axes = ctx.op, ctx.y, ctx.op.ints(axis)
    norm = op.ReduceL2(x, axes, keepdims=1) if p == 2 else op.ReduceL1(x, axes, keepdims=1)
    zero = op.like(0.0, x)
    empty = op.Equal(norm, zero)
    y = op.Where(empty, zero, y)
    share = op.Where(empty, zero, op.Reciprocal(op.Where(empty, op.like(1.0, x), norm)))
    slope = y if p == 2 else op.Sign(x)
    return (dy - slope * op.ReduceSum(dy * y, axes, keepdims=1)) * share


@gradient("LRN")
def lrn(
    ctx: Context, dy: Value, x: Value, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Any:
    """One node: LRNGrad."""
    return ctx.op.LRNGrad(dy, x, size=size, alpha=alpha, beta=beta, bias=bias)


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    ctx: Context,
    dy: Value | None,
    scores: Value,
    labels: Value,
    weights: Value | None = None,
    *,
    reduction: str = "mean",
    ignore_index: Any = None,
) -> Any:
    """dlosses · (softmax(scores) - onehot(labels)), from the log probabilities that the forward pass gives.

    Their own gradient is added as LogSoftmax hands it on.
    """
    op, dlog = ctx.op, (*ctx.dys, None)[1]
    through_log = None if dlog is None else op.LogSoftmaxGrad(dlog, ctx.output(1), axis=1)
    if dy is None:
        return through_log, None, None
    dlosses, dweights = _of_labels(ctx, dy, ctx.output(1), labels, weights, reduction, ignore_index)
    through_loss = op.SoftmaxCrossEntropyLossGrad(dlosses, ctx.output(1), labels)
    return (through_loss if through_log is None else through_loss + through_log), None, dweights


@gradient("LinearCrossEntropy", domain=DOMAIN)
def linear_cross_entropy(
    ctx: Context, dy: Value, x: Value, weight: Value, bias: Value | None, labels: Value, **_: Any
) -> Any:
    """What the forward pass gives for a gradient of 1, times dy; gradients of half types come in float32."""
    ctx.first_output_only()

    def scaled(index: int, operand: Value) -> Value:
        return ctx.op.cast(ctx.op.ScaleGradient(ctx.output(index), dy), shapes.dtype_of(operand))

    return scaled(1, x), scaled(2, weight), None if bias is None else scaled(3, bias), None


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
    dlosses, dweights = _of_labels(ctx, dy, log_prob, labels, weights, reduction, ignore_index)
    return ctx.op.NegativeLogLikelihoodLossGrad(dlosses, log_prob, labels), None, dweights


def _of_labels(
    ctx: Context, dy: Value, log_prob: Value, labels: Value, weights: Value | None, reduction: str, ignore: Any
) -> tuple[Value, Value | None]:
    """The gradient of each label's own loss, weighted and divided as the reduction says, and that of the weights.

    It is 0 for ignored labels. With no label left the mean divides by 0; the gradient is 0 all the same, as in torch.
    """
    op, zero = ctx.op, ctx.op.constant(0, shapes.dtype_of(labels))
    kept = None if ignore is None else op.Not(op.Equal(labels, op.constant(ignore, shapes.dtype_of(labels))))
    safe, share = labels if kept is None else op.Where(kept, labels, zero), None
    if weights is not None:
        share = op.Gather(weights, safe)
    if reduction == "mean":
        counted = op.cast(kept, shapes.dtype_of(log_prob)) if kept is not None else None
        dy = dy / _total(op, log_prob, labels, share, counted)

    def spread(made: Value) -> Value:
        if kept is None:
            return op.Expand(made, op.shape(labels))
        return op.Where(kept, made, op.like(0.0, log_prob))

    if weights is None or share is None or not ctx.wanted[2]:
        return spread(dy if share is None else share * dy), None
    losses = op.NegativeLogLikelihoodLoss(log_prob, safe, reduction="none")
    rises = losses - ctx.y if reduction == "mean" else losses  # a weight moves the mean towards its labels' losses
    return spread(share * dy), _of_classes(op, spread(dy * rises), safe, weights)


def _of_classes(op: Builder, values: Value, labels: Value, weights: Value) -> Value:
    """The sum of the values of each class's labels."""
    zeros, flat = op.Expand(op.like(0.0, weights), op.shape(weights)), op.ints(-1)
    places = op.Reshape(op.cast(labels, ir.DataType.INT64), flat)
    return op.ScatterElements(zeros, places, op.Reshape(values, flat), axis=0, reduction="add")


def _total(op: Builder, scores: Value, labels: Value, share: Value | None, counted: Value | None) -> Value:
    """What a mean over labels divides by: the sum of their weights, ignored labels left out."""
    if share is None and counted is None:
        return op.cast(op.Size(labels), shapes.dtype_of(scores))
    both = share if counted is None else counted if share is None else share * counted
    return op.ReduceSum(both, keepdims=0)
