"""Gradients of gathering and scattering."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.gradient.rules.reductions import shared
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("Gather")
def gather(ctx: Context, dy: Value, x: Value, indices: Value, *, axis: int = 0) -> Any:
    """dy added at the indices, duplicates summed."""
    return ctx.op.GatherGrad(dy, indices, ctx.op.shape(x), axis=axis)


@gradient("Embedding", domain=DOMAIN)
def embedding(ctx: Context, dy: Value, weight: Value, indices: Value, *, padding_idx: int = -1) -> Any:
    """Rows of dy added at their indices, but for the padding row."""
    return ctx.op.EmbeddingGrad(dy, indices, ctx.op.shape(weight), padding_idx=padding_idx)


@gradient("GatherElements")
def gather_elements(ctx: Context, dy: Value, x: Value, indices: Value, *, axis: int = 0) -> Any:
    """dy added at the indices, in zeros."""
    return ctx.op.ScatterElements(_zeros(ctx, x), indices, dy, axis=axis, reduction="add")


def _zeros(ctx: Context, x: Value) -> Value:
    return ctx.op.Expand(ctx.op.like(0.0, x), ctx.op.shape(x))


@gradient("GatherND")
def gather_nd(ctx: Context, dy: Value, x: Value, indices: Value, *, batch_dims: int = 0) -> Any:
    """dy added at the index tuples, which become row numbers."""
    op = ctx.op
    numbers, matrix_shape = _as_rows(ctx, x, indices, batch_dims)
    width = op.Slice(matrix_shape, op.ints(1), op.ints(2))
    slices = op.Reshape(dy, op.Concat(op.Shape(numbers), width, axis=0), allowzero=1)
    made = op.GatherGrad(slices, numbers, matrix_shape)
    are_rows = not batch_dims and shapes.rank(x) == 2 and shapes.known_dims(indices)[-1] == 1
    return made if are_rows else op.Reshape(made, op.shape(x), allowzero=1)


def _as_rows(ctx: Context, x: Value, indices: Value, batch_dims: int = 0) -> tuple[Value, Value]:
    """Index tuples as row numbers, and the shape of x as a matrix of the slices that they choose among."""
    op, shape, count = ctx.op, ctx.op.shape(x), shapes.known_dims(indices)[-1]
    if not isinstance(count, int):
        raise ctx.unsupported(f"the gradient of {ctx.node.op_type} whose index tuples have no known length")
    numbers = op.constant(0)
    for place in range(count):
        size, part = op.size(x, batch_dims + place), op.Gather(indices, op.constant(place), axis=-1)
        positive = op.Where(op.Less(part, op.constant(0)), op.Add(part, size), part)
        numbers = op.Add(op.Mul(numbers, size), positive) if place else positive
    if batch_dims:
        numbers = _in_batches(ctx, shape, numbers, batch_dims, count)
    choices, end = op.ints(batch_dims + count), op.ints(shapes.rank(x))
    rows = op.ReduceProd(op.Slice(shape, op.ints(0), choices), keepdims=1)
    width = op.ReduceProd(op.Slice(shape, choices, end), keepdims=1)
    return op.Reshape(numbers, op.ints(-1)), op.Concat(rows, width, axis=0)


def _in_batches(ctx: Context, shape: Value, numbers: Value, batch_dims: int, count: int) -> Value:
    """Row numbers within each batch entry as row numbers of all of them: (batch, numbers of one entry)."""
    op, lead = ctx.op, ctx.op.ints(batch_dims)
    batch = op.ReduceProd(op.Slice(shape, op.ints(0), lead), keepdims=1)
    each = op.ReduceProd(op.Slice(shape, lead, op.ints(batch_dims + count)), keepdims=1)
    entries = op.Range(op.constant(0), op.Squeeze(batch, op.ints(0)), op.constant(1))
    firsts = op.Mul(op.Unsqueeze(entries, op.ints(1)), each)
    return op.Add(op.Reshape(numbers, op.Concat(batch, op.ints(-1), axis=0)), firsts)


@gradient("ScatterElements")
def scatter_elements(
    ctx: Context, dy: Value, x: Value, indices: Value, updates: Value, *, axis: int = 0, reduction: str = "none"
) -> Any:
    """dx = dy, 0 where overwritten; dupdates = dy at the indices; other reductions as below."""
    op = ctx.op
    if reduction not in ("none", "add"):
        dx, du = _combined(ctx, dy, x, ctx.y, indices, updates, axis, reduction)
        return dx, None, du
    taken = op.GatherElements(dy, indices, axis=axis)
    if reduction == "add":
        return dy, None, taken
    return op.ScatterElements(dy, indices, _zeros(ctx, updates), axis=axis), None, taken


@gradient("Unique")
def unique(ctx: Context, dy: Value, x: Value, *, axis: Any = None, **_: Any) -> Any:
    """dy where each element or slice is met first; 0 at its repetitions."""
    op, first = ctx.op, ctx.output(1)
    if axis is not None:
        return op.GatherGrad(dy, first, op.shape(x), axis=axis)
    flat = op.GatherGrad(dy, first, op.Reshape(op.Size(x), op.ints(1)), axis=0)
    return op.Reshape(flat, op.shape(x), allowzero=1)


@gradient("ScatterND")
def scatter_nd(ctx: Context, dy: Value, x: Value, indices: Value, updates: Value, *, reduction: str = "none") -> Any:
    """As ScatterElements on rows: runtimes add and multiply duplicates rightly there."""
    op = ctx.op
    if indices.dtype == ir.DataType.INT32:  # torch.onnx writes what torch has been given
        indices = op.Cast(indices, to=ir.DataType.INT64)
    if reduction == "add":
        return dy, None, op.GatherND(dy, indices)
    if reduction == "none":
        return op.ScatterND(dy, indices, _zeros(ctx, updates)), None, op.GatherND(dy, indices)
    numbers, shape = _as_rows(ctx, x, indices)
    g, old, new = (op.Reshape(v, shape, allowzero=1) for v in (dy, x, ctx.y))
    rows = op.Reshape(updates, op.Concat(op.Shape(numbers), op.Slice(shape, op.ints(1), op.ints(2)), axis=0))
    at = op.Expand(op.Unsqueeze(numbers, op.ints(1)), op.Shape(rows))
    dx, du = _combined(ctx, g, old, new, at, rows, 0, reduction)
    return op.Reshape(dx, op.shape(x), allowzero=1), None, op.Reshape(du, op.shape(updates), allowzero=1)


def _combined(
    ctx: Context, dy: Value, x: Value, y: Value, indices: Value, updates: Value, axis: int, reduction: str
) -> tuple[Value, Value]:
    """Gradients of x and updates where ScatterElements takes a product or an extreme of all that meet in a place."""

    def take(value: Value) -> Value:
        return ctx.op.GatherElements(value, indices, axis=axis)

    def meet(a: Value, b: Value, how: str) -> Value:
        return ctx.op.ScatterElements(a, indices, b, axis=axis, reduction=how)

    def count(a: Value, b: Value) -> Value:
        return meet(ctx.op.cast(a, ir.DataType.INT64), ctx.op.cast(b, ir.DataType.INT64), "add")

    op, zero = ctx.op, ctx.op.like(0.0, dy)
    if reduction == "mul":
        one = op.like(1.0, x)
        lost = op.Equal(x, zero), op.Equal(updates, zero)
        factors = op.Where(lost[0], one, x), op.Where(lost[1], one, updates)
        zeros, product = count(*lost), dy * meet(*factors, "mul")
        dx = _without(ctx, product / factors[0], zeros, lost[0])
        return dx, _without(ctx, take(product) / factors[1], take(zeros), lost[1])
    hits = op.Equal(x, y), op.Equal(updates, take(y))
    share = shared(ctx, dy, count(*hits))
    return op.Where(hits[0], share, zero), op.Where(hits[1], take(share), zero)


def _without(ctx: Context, others: Value, zeros: Value, is_zero: Value) -> Value:
    """The product of the other factors: 0 where one of them is 0."""
    left = ctx.op.Sub(zeros, ctx.op.cast(is_zero, ir.DataType.INT64))
    return ctx.op.Where(ctx.op.Greater(left, ctx.op.constant(0)), ctx.op.like(0.0, others), others)


@gradient("TopK")
def top_k(ctx: Context, dy: Value, x: Value, k: Value, *, axis: int = -1, **_: Any) -> Any:
    """dy scattered to the selected elements."""
    return ctx.op.ScatterElements(_zeros(ctx, x), ctx.output(1), dy, axis=axis)


@gradient("Compress")
def compress(ctx: Context, dy: Value, x: Value, condition: Value, *, axis: int | None = None) -> Any:
    """dy at the places where the condition is true, in zeros."""
    op = ctx.op
    places = op.Reshape(op.NonZero(condition), op.ints(-1))
    if axis is not None:
        return op.GatherGrad(dy, places, op.shape(x), axis=axis)
    flat = op.GatherGrad(dy, places, op.Reshape(op.Size(x), op.ints(1)))
    return op.Reshape(flat, op.shape(x), allowzero=1)


@gradient("OneHot")
def one_hot(ctx: Context, dy: Value, indices: Value, depth: Value, values: Value, *, axis: int = -1) -> Any:
    """The two values receive what dy holds where each of them was written."""
    op = ctx.op
    marks = op.OneHot(indices, depth, op.constant(np.array([0, 1]), shapes.dtype_of(dy)), axis=axis)
    sums = [op.ReduceSum(dy * m, keepdims=0) for m in (op.like(1.0, dy) - marks, marks)]
    return None, None, op.Concat(*(op.Unsqueeze(s, op.ints(0)) for s in sums), axis=0)
