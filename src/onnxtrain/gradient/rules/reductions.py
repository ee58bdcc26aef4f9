"""Gradients of reductions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


def _spread(ctx: Context, value: Value, x: Value, axes: Value | None, keepdims: int) -> Value:
    """A reduced value in a shape that broadcasts against x."""
    if keepdims:
        return value
    op = ctx.op
    if axes is None:
        stated = shapes.attribute(ctx.node, "axes")
        kept = stated if stated else range(shapes.rank(x))
        axes = op.ints(*kept)
    return op.Unsqueeze(value, axes)


def _is_noop(ctx: Context, axes: Value | None) -> bool:
    empty = axes is None or (shapes.constant_of(axes) is not None and shapes.constant_of(axes).size == 0)  # type: ignore[union-attr]
    return bool(empty and shapes.attribute(ctx.node, "noop_with_empty_axes", 0))


@gradient("ReduceSum")
def reduce_sum(ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    """dy expanded to x's shape."""
    if _is_noop(ctx, axes):
        return dy
    return ctx.op.Expand(_spread(ctx, dy, x, axes, keepdims), ctx.op.shape(x))


@gradient("ReduceMean")
def reduce_mean(ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    """dy divided by the number of elements of each mean, expanded."""
    op = ctx.op
    if _is_noop(ctx, axes):
        return dy
    total = op.Div(op.Size(x), op.Size(ctx.y))
    mean = dy / op.cast(total, shapes.dtype_of(dy))
    return op.Expand(_spread(ctx, mean, x, axes, keepdims), op.shape(x))


@gradient("ReduceMax", "ReduceMin")
def reduce_extreme(ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    """dy shared equally among the elements that attain the extreme."""
    op = ctx.op
    if _is_noop(ctx, axes):
        return dy
    hits = op.cast(op.Equal(x, _spread(ctx, ctx.y, x, axes, keepdims)), shapes.dtype_of(dy))
    count = op.ReduceSum(hits, axes, keepdims=1)
    return hits * (_spread(ctx, dy, x, axes, keepdims) / count)


@gradient("ReduceL2")
def reduce_l2(ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    """dy · x / y, 0 where the norm is 0."""
    op = ctx.op
    y = _spread(ctx, ctx.y, x, axes, keepdims)
    zero = op.like(0.0, x)
    safe = op.Where(op.Equal(y, zero), op.like(1.0, x), y)
    return x * (_spread(ctx, dy, x, axes, keepdims) / safe)


@gradient("ReduceL1")
def reduce_l1(ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    """dy · sign(x)."""
    return ctx.op.Sign(x) * _spread(ctx, dy, x, axes, keepdims)


@gradient("ReduceSumSquare")
def reduce_sum_square(
    ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any
) -> Any:
    """2 · x · dy."""
    return x * _spread(ctx, dy, x, axes, keepdims) * 2.0


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(
    ctx: Context, dy: Value, x: Value, axes: Value | None = None, *, keepdims: int = 1, **_: Any
) -> Any:
    """dy · exp(x - y)."""
    op = ctx.op
    return op.Exp(x - _spread(ctx, ctx.y, x, axes, keepdims)) * _spread(ctx, dy, x, axes, keepdims)


@gradient("CumSum")
def cum_sum(ctx: Context, dy: Value, x: Value, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Any:
    """The cumulative sum of dy from the other end."""
    return ctx.op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)
