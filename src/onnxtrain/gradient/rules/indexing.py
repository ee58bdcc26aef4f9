"""Gradients of gathering and scattering."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
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
    op = ctx.op
    zeros = op.Expand(op.like(0.0, x), op.shape(x))
    return op.ScatterElements(zeros, indices, dy, axis=axis, reduction="add")


@gradient("GatherND")
def gather_nd(ctx: Context, dy: Value, x: Value, indices: Value, *, batch_dims: int = 0) -> Any:
    """dy added at the index tuples, which become row numbers (they are not negative: torch makes them so)."""
    op = ctx.op
    if batch_dims:
        raise ctx.unsupported("the gradient of GatherND with batch_dims")
    shape, count = op.shape(x), shapes.known_dims(indices)[-1]
    if not isinstance(count, int):
        raise ctx.unsupported("the gradient of GatherND whose index tuples have no known length")
    flat = op.Gather(indices, op.constant(0), axis=-1)
    for axis in range(1, count):
        flat = op.Add(op.Mul(flat, op.size(x, axis)), op.Gather(indices, op.constant(axis), axis=-1))
    rows = op.ReduceProd(op.Slice(shape, op.ints(0), op.ints(count)), keepdims=1)
    width = op.ReduceProd(op.Slice(shape, op.ints(count), op.ints(shapes.rank(x))), keepdims=1)
    flat = op.Reshape(flat, op.ints(-1))
    matrix = op.Reshape(dy, op.Concat(op.Shape(flat), width, axis=0), allowzero=1)
    return op.Reshape(op.GatherGrad(matrix, flat, op.Concat(rows, width, axis=0)), shape, allowzero=1)


@gradient("ScatterElements")
def scatter_elements(
    ctx: Context, dy: Value, x: Value, indices: Value, updates: Value, *, axis: int = 0, reduction: str = "none"
) -> Any:
    """dx = dy, 0 where overwritten; dupdates = dy at the indices."""
    op = ctx.op
    if reduction not in ("none", "add"):
        raise ctx.unsupported(f"the gradient of ScatterElements with reduction {reduction!r}")
    taken = op.GatherElements(dy, indices, axis=axis)
    if reduction == "add":
        return dy, None, taken
    zeros = op.Expand(op.like(0.0, updates), op.shape(updates))
    return op.ScatterElements(dy, indices, zeros, axis=axis), None, taken


@gradient("ScatterND")
def scatter_nd(ctx: Context, dy: Value, x: Value, indices: Value, updates: Value, *, reduction: str = "none") -> Any:
    """dx = dy, 0 where overwritten; dupdates = dy at the index tuples."""
    op = ctx.op
    if reduction not in ("none", "add"):
        raise ctx.unsupported(f"the gradient of ScatterND with reduction {reduction!r}")
    taken = op.GatherND(dy, indices)
    if reduction == "add":
        return dy, None, taken
    zeros = op.Expand(op.like(0.0, updates), op.shape(updates))
    return op.ScatterND(dy, indices, zeros), None, taken


@gradient("TopK")
def top_k(ctx: Context, dy: Value, x: Value, k: Value, *, axis: int = -1, **_: Any) -> Any:
    """dy scattered to the selected elements."""
    op = ctx.op
    zeros = op.Expand(op.like(0.0, x), op.shape(x))
    return op.ScatterElements(zeros, ctx.node.outputs[1], dy, axis=axis)
