"""Gradients of operators that move elements without computing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value
_LARGEST = np.iinfo(np.int64).max


@gradient("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(ctx: Context, dy: Value, x: Value, *_: Value, **attributes: Any) -> Any:
    """dy in x's shape."""
    return ctx.op.Reshape(dy, ctx.op.shape(x), allowzero=1)


@gradient("Expand")
def expand(ctx: Context, dy: Value, x: Value, shape: Value) -> Any:
    """dy: the walk sums it to x's shape."""
    return dy


@gradient("Transpose")
def transpose(ctx: Context, dy: Value, x: Value, *, perm: Any = None) -> Any:
    """dy with the inverse permutation."""
    order = list(perm) if perm is not None else list(range(shapes.rank(x)))[::-1]
    return ctx.op.Transpose(dy, perm=[order.index(i) for i in range(len(order))])


@gradient("Concat")
def concat(ctx: Context, dy: Value, *parts: Value, axis: int) -> Any:
    """dy split at the parts' sizes."""
    op = ctx.op
    if len(parts) == 1:
        return dy
    sizes = op.Concat(*(op.size(p, axis) for p in parts), axis=0)
    return op.Split(dy, sizes, axis=axis, outputs=len(parts))


@gradient("Split")
def split(
    ctx: Context, dy: Value, x: Value, sizes: Value | None = None, *, axis: int = 0, num_outputs: Any = None
) -> Any:
    """The outputs' gradients side by side; zeros for an output that has none."""
    op = ctx.op
    parts = [
        g if g is not None else op.Expand(op.like(0.0, x), op.shape(y))
        for g, y in zip(ctx.dys, ctx.node.outputs, strict=True)
    ]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


@gradient("Slice")
def slice_(
    ctx: Context, dy: Value, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None
) -> Any:
    """dy at its place in zeros: padded where the steps are 1, scattered otherwise."""
    op = ctx.op
    step = shapes.constant_of(steps)
    first, at = shapes.data_of(starts), shapes.constant_of(axes)
    simple = steps is None or (step is not None and (step == 1).all())
    rank = shapes.rank(x)
    places = list(range(rank)) if axes is None else None if at is None else [int(a) % rank for a in at.reshape(-1)]
    if simple and isinstance(first, tuple) and places is not None and all(isinstance(f, int) and f >= 0 for f in first):
        return _pad_back(ctx, dy, x, [int(f) for f in first], places)  # type: ignore[arg-type]
    positions = op.Reshape(op.Range(op.constant(0), op.Size(x), op.constant(1)), op.shape(x), allowzero=1)
    taken = op.Slice(positions, starts, ends, axes, steps)
    flat = op.Expand(op.like(0.0, x), op.Reshape(op.Size(x), op.ints(1)))
    summed = op.ScatterElements(flat, op.Reshape(taken, op.ints(-1)), op.Reshape(dy, op.ints(-1)), axis=0)
    return op.Reshape(summed, op.shape(x), allowzero=1)


def _pad_back(ctx: Context, dy: Value, x: Value, starts: list[int], places: list[int]) -> Value:
    op = ctx.op
    before = op.ints(*starts)
    axes = op.ints(*places)
    sizes = [op.Gather(op.shape(v), axes) for v in (x, dy)]
    after = op.Max(op.Sub(op.Sub(sizes[0], sizes[1]), before), op.ints(*[0] * len(places)))
    pads = op.Concat(before, after, axis=0)
    return op.Pad(dy, pads, op.like(0.0, dy), axes)


@gradient("Pad")
def pad(
    ctx: Context,
    dy: Value,
    x: Value,
    pads: Value,
    value: Value | None = None,
    axes: Value | None = None,
    *,
    mode: str = "constant",
) -> Any:
    """Constant mode: the pads taken away again."""
    op = ctx.op
    if mode != "constant":
        raise ctx.unsupported(f"the gradient of Pad in mode {mode!r}")
    return op.Pad(dy, op.Neg(pads), op.like(0.0, dy), axes)


@gradient("Tile")
def tile(ctx: Context, dy: Value, x: Value, repeats: Value) -> Any:
    """Copies of each axis summed: dy as (repeat, size) pairs of axes."""
    op = ctx.op
    rank = shapes.rank(x)
    if rank == 0:
        return dy
    pairs = op.Reshape(
        op.Transpose(op.Reshape(op.Concat(repeats, op.shape(x), axis=0), op.ints(2, -1)), perm=[1, 0]),
        op.ints(2 * rank),
    )
    return op.ReduceSum(op.Reshape(dy, pairs, allowzero=1), op.ints(*range(0, 2 * rank, 2)), keepdims=0)


@gradient("Trilu")
def trilu(ctx: Context, dy: Value, x: Value, k: Value | None = None, *, upper: int = 1) -> Any:
    """The same triangle of dy."""
    return ctx.op.Trilu(dy, k, upper=upper)
