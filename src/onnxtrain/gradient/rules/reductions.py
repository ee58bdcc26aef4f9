"""Gradients of reductions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


def _axes(ctx: Context, x: Value, axes: Value | None) -> Value | None:
    """The axes that are reduced, as a value: all where none are given; None where nothing is reduced."""
    content = shapes.constant_of(axes)
    if axes is not None and (content is None or content.size):
        return axes
    if shapes.attribute(ctx.node, "noop_with_empty_axes", 0):
        return None
    return ctx.op.ints(*range(shapes.rank(x)))


def _spread(ctx: Context, value: Value, x: Value, axes: Value | None) -> Value:
    """A reduced value in a shape that broadcasts against x."""
    over = _axes(ctx, x, axes)
    if shapes.attribute(ctx.node, "keepdims", 1) or over is None:
        return value
    return ctx.op.Unsqueeze(value, over)


def _over(ctx: Context, compute: str, value: Value, x: Value, axes: Value | None) -> Value:
    """A value of x's shape reduced as x is, with axes of size 1 kept."""
    over = _axes(ctx, x, axes)
    return value if over is None else getattr(ctx.op, compute)(value, over, keepdims=1)


def _count(ctx: Context, condition: Value, x: Value, axes: Value | None) -> Value:
    """How many elements of each reduction fulfil a condition: as int64, floats cannot count that far."""
    return _over(ctx, "ReduceSum", ctx.op.cast(condition, ir.DataType.INT64), x, axes)


def shared(ctx: Context, dy: Value, count: Value) -> Value:
    """dy over a count, in single precision at least: half precision ends at 65504."""
    op, dtype = ctx.op, shapes.dtype_of(dy)
    wide = ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype
    return op.cast(op.cast(dy, wide) / op.cast(count, wide), dtype)


@gradient("ReduceSum")
def reduce_sum(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy expanded to x's shape."""
    if _axes(ctx, x, axes) is None:
        return dy
    return ctx.op.Expand(_spread(ctx, dy, x, axes), ctx.op.shape(x))


@gradient("ReduceMean")
def reduce_mean(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy divided by the number of elements of each mean, expanded."""
    op = ctx.op
    if _axes(ctx, x, axes) is None:
        return dy
    share = shared(ctx, dy, op.share(x, ctx.y))
    return op.Expand(_spread(ctx, share, x, axes), op.shape(x))


@gradient("ReduceMax", "ReduceMin")
def reduce_extreme(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy shared equally among the elements that attain the extreme; where it is no number, torch has none either.

    Only of the extreme of all elements, where no axes are named, those that are no numbers share it then.
    """
    op = ctx.op
    if _axes(ctx, x, axes) is None:
        return dy
    y = _spread(ctx, ctx.y, x, axes)
    attained = op.Equal(x, y)
    if axes is None:
        attained = op.Or(attained, op.And(op.IsNaN(x), op.IsNaN(y)))
    share = shared(ctx, _spread(ctx, dy, x, axes), _count(ctx, attained, x, axes))
    return op.cast(attained, shapes.dtype_of(dy)) * share


@gradient("ReduceProd")
def reduce_prod(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy · the product of the other elements."""
    over = _axes(ctx, x, axes)
    return dy if over is None else _spread(ctx, dy, x, axes) * ctx.op.ProductOfOthers(x, over)


@gradient("ProductOfOthers", domain=DOMAIN)
def product_of_others(ctx: Context, dy: Value, x: Value, axes: Value) -> Any:
    """Σ dy_i · the product of all but i and k, for k: of a matrix whose row i has all elements, and 1 in place i."""
    op, content = ctx.op, shapes.constant_of(axes)
    if content is None:
        raise ctx.unsupported("the second gradient of a product along axes that are computed")
    reduced = [int(axis) % shapes.rank(x) for axis in content]
    order = [axis for axis in range(shapes.rank(x)) if axis not in reduced] + reduced
    turned, turned_dy = (op.Transpose(v, perm=order) for v in (x, dy))
    kept, count = op.ints(*range(len(order) - len(reduced))), op.ints(*range(len(order) - len(reduced), len(order)))
    size = op.ReduceProd(op.Gather(op.shape(turned), count), keepdims=1)
    flat = op.Concat(op.Gather(op.shape(turned), kept), size, axis=0)
    places = op.Range(op.constant(0), op.Squeeze(size), op.constant(1))
    own = op.Equal(op.Unsqueeze(places, op.ints(1)), places)
    each = op.Where(own, op.like(1.0, x), op.Unsqueeze(op.Reshape(turned, flat, allowzero=1), op.ints(-2)))
    both = op.Where(own, op.like(0.0, x), op.ProductOfOthers(each, op.ints(-1)))
    row = op.Unsqueeze(op.Reshape(turned_dy, flat, allowzero=1), op.ints(-2))
    dx = op.Reshape(op.Squeeze(op.MatMul(row, both), op.ints(-2)), op.shape(turned), allowzero=1)
    return op.Transpose(dx, perm=[order.index(axis) for axis in range(len(order))])


@gradient("ReduceL2")
def reduce_l2(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy · x / y, 0 where the norm is 0."""
    op, zero = ctx.op, ctx.op.like(0.0, x)
    y = _spread(ctx, ctx.y, x, axes)
    return x * op.Where(op.Equal(y, zero), zero, _spread(ctx, dy, x, axes) / y)


@gradient("ReduceL1")
def reduce_l1(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy · sign(x)."""
    return ctx.op.Sign(x) * _spread(ctx, dy, x, axes)


@gradient("ReduceSumSquare")
def reduce_sum_square(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """2 · x · dy."""
    return x * _spread(ctx, dy, x, axes) * 2.0


@gradient("ReduceLogSum")
def reduce_log_sum(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy / Σ x, expanded."""
    op = ctx.op
    return op.Expand(_spread(ctx, dy, x, axes) / _over(ctx, "ReduceSum", x, x, axes), op.shape(x))


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(ctx: Context, dy: Value, x: Value, axes: Value | None = None, **_: Any) -> Any:
    """dy · exp(x - y)."""
    return ctx.op.Exp(x - _spread(ctx, ctx.y, x, axes)) * _spread(ctx, dy, x, axes)


@gradient("CumSum")
def cum_sum(ctx: Context, dy: Value, x: Value, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Any:
    """The cumulative sum of dy from the other end."""
    return ctx.op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)


@gradient("CumProd")
def cum_prod(ctx: Context, dy: Value, x: Value, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Any:
    """The cumulative sum of dy · y from the other end, over x; for the first 0 of a row with y as if that were 1."""
    op, one = ctx.op, ctx.op.like(1.0, x)
    is_zero = op.Equal(x, op.like(0.0, x))
    before = op.CumSum(op.cast(is_zero, ir.DataType.INT64), axis, exclusive=1, reverse=reverse)
    first = op.And(is_zero, op.Equal(before, op.constant(0)))
    rest = op.CumProd(op.Where(first, one, x), axis, exclusive=exclusive, reverse=reverse)
    over, of_zero = (op.CumSum(dy * y, axis, exclusive=exclusive, reverse=1 - reverse) for y in (ctx.y, rest))
    return op.Where(first, of_zero, over / op.Where(is_zero, one, x))
