"""Gradients of operators that move elements without computing."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


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
    parts = [g if g is not None else op.Expand(op.like(0.0, x), op.shape(ctx.output(i))) for i, g in enumerate(ctx.dys)]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


@gradient("Slice")
def slice_(
    ctx: Context, dy: Value, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None
) -> Any:
    """dy at its place in zeros: padded where the steps are 1 and the starts known, else one node of ours."""
    op = ctx.op
    step = shapes.constant_of(steps)
    first, at = shapes.data_of(starts), shapes.constant_of(axes)
    simple = steps is None or (step is not None and (step == 1).all())
    rank = shapes.rank(x)
    count = shapes.known_dims(starts)[0]
    if axes is None and not isinstance(count, int):
        raise ctx.unsupported("the gradient of Slice with an unknown number of axes")
    places = list(range(count)) if axes is None else None if at is None else [int(a) % rank for a in at.reshape(-1)]  # type: ignore[arg-type]
    if simple and isinstance(first, tuple) and places is not None and all(isinstance(f, int) and f >= 0 for f in first):
        return _pad_back(ctx, dy, x, [int(f) for f in first], places)  # type: ignore[arg-type]
    starts, ends = (op.cast(v, ir.DataType.INT64) for v in (starts, ends))
    axes = op.ints(*places) if places is not None else op.cast(axes, ir.DataType.INT64)  # type: ignore[arg-type]
    steps = op.Expand(op.constant(1), op.Shape(axes)) if steps is None else op.cast(steps, ir.DataType.INT64)
    return op.SliceGrad(dy, op.shape(x), starts, ends, axes, steps)


def _pad_back(ctx: Context, dy: Value, x: Value, starts: list[int], places: list[int]) -> Value:
    op, dims = ctx.op, list(zip(shapes.known_dims(x), shapes.known_dims(dy), strict=True))
    before, axes = op.ints(*starts), op.ints(*places)
    sizes = [op.Gather(op.shape(v), axes) for v in (x, dy)]
    missing = op.Sub(*sizes)
    if not all(_lies_inside(start, *dims[axis]) for start, axis in zip(starts, places, strict=True)):
        before = op.Min(before, missing)  # what starts beyond the end is empty, and all of x is missing
    after = op.Max(op.Sub(missing, before), op.ints(*[0] * len(places)))
    pads = op.Concat(before, after, axis=0)
    return op.Pad(dy, pads, op.like(0.0, dy), axes)


def _lies_inside(start: int, whole: shapes.Dim, part: shapes.Dim) -> bool:
    """Whether a part is known to begin within the whole."""
    missing = shapes.simplify(whole - part) if shapes.are_known((whole, part)) else None
    return start == 0 or (isinstance(missing, int) and missing >= start)


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
    """The pads taken away again: what they repeat of x is added to it, what is constant to the constant."""
    op, zero = ctx.op, ctx.op.like(0.0, dy)
    if mode != "constant":
        return op.PadGrad(dy, op.shape(x), _all_pads(ctx, x, pads, axes), mode=mode)
    dx = op.Pad(dy, op.Neg(pads), zero, axes)
    if value is None or shapes.constant_of(value) is not None:
        return dx
    one = op.like(1.0, dy)
    outside = op.Pad(op.Expand(zero, op.shape(x)), pads, one, axes)
    return dx, None, op.ReduceSum(dy * outside, keepdims=0)


def _all_pads(ctx: Context, x: Value, pads: Value, axes: Value | None) -> Value:
    """The pads of all axes: before each of them, then after each."""
    op, rank = ctx.op, shapes.rank(x)
    if axes is None:
        return pads
    at = shapes.constant_of(axes)
    if at is None:
        raise ctx.unsupported(f"the gradient of Pad in mode {shapes.attribute(ctx.node, 'mode')!r} with unknown axes")
    places = [int(a) % rank for a in at.reshape(-1)]
    before_after = [places.index(i) + k * len(places) if i in places else -1 for k in (0, 1) for i in range(rank)]
    return op.Gather(op.Concat(pads, op.ints(0), axis=0), op.ints(*before_after))


@gradient("Tile")
def tile(ctx: Context, dy: Value, x: Value, repeats: Value) -> Any:
    """Copies of each axis summed: dy as (repeat, size) pairs of axes."""
    op = ctx.op
    rank = shapes.rank(x)
    if rank == 0:
        return dy
    pairs = op.Gather(
        op.Concat(repeats, op.shape(x), axis=0), op.ints(*(i for axis in range(rank) for i in (axis, rank + axis)))
    )
    return op.ReduceSum(op.Reshape(dy, pairs, allowzero=1), op.ints(*range(0, 2 * rank, 2)), keepdims=0)


@gradient("Trilu")
def trilu(ctx: Context, dy: Value, x: Value, k: Value | None = None, *, upper: int = 1) -> Any:
    """The same triangle of dy."""
    return ctx.op.Trilu(dy, k, upper=upper)


@gradient("DepthToSpace")
def depth_to_space(ctx: Context, dy: Value, x: Value, *, blocksize: int, mode: str = "DCR") -> Any:
    """The blocks taken apart again, into the channels as they were ordered."""
    op = ctx.op
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=blocksize)
    block, rest = op.ints(blocksize), op.ints(-1)
    apart = op.Concat(op.size(x, 0), rest, op.size(x, 2), block, op.size(x, 3), block, axis=0)
    return op.Reshape(op.Transpose(op.Reshape(dy, apart), perm=[0, 1, 3, 5, 2, 4]), op.shape(x), allowzero=1)


@gradient("SpaceToDepth")
def space_to_depth(ctx: Context, dy: Value, x: Value, *, blocksize: int, mode: str = "DCR") -> Any:
    """The blocks put together again."""
    return ctx.op.DepthToSpace(dy, blocksize=blocksize, mode=mode)


@gradient("ReverseSequence")
def reverse_sequence(
    ctx: Context, dy: Value, x: Value, lengths: Value, *, batch_axis: int = 1, time_axis: int = 0
) -> Any:
    """The same elements of dy reversed."""
    return ctx.op.ReverseSequence(dy, lengths, batch_axis=batch_axis, time_axis=time_axis)


@gradient("CenterCropPad")
def center_crop_pad(ctx: Context, dy: Value, x: Value, shape: Value, *, axes: Any = None) -> Any:
    """What was padded is cropped, what was cropped is padded with zeros."""
    op = ctx.op
    sizes = op.shape(x) if axes is None else op.Gather(op.shape(x), op.ints(*(a % shapes.rank(x) for a in axes)))
    return op.CenterCropPad(dy, sizes, axes=axes)


@gradient("Col2Im")
def col2im(
    ctx: Context,
    dy: Value,
    x: Value,
    image: Value,
    block: Value,
    *,
    dilations: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """Every window of dy as a column: per axis one Gather by (place in the window, window) pairs."""
    op = ctx.op
    count = shapes.rank(dy) - 2
    steps, holes = strides or [1] * count, dilations or [1] * count
    margins = list(pads or [0] * 2 * count)
    apart = op.Pad(dy, op.ints(*margins), op.like(0.0, dy), op.ints(*range(2, 2 + count)))
    one = op.constant(1)
    for axis in range(count):
        wide = op.Squeeze(op.size(apart, 2 + 2 * axis))
        reach = op.Sub(op.Gather(block, op.constant(axis)), one)
        within = op.Range(
            op.constant(0), op.Add(op.Mul(reach, op.constant(holes[axis])), one), op.constant(holes[axis])
        )
        firsts = op.Range(
            op.constant(0), op.Sub(wide, op.Mul(reach, op.constant(holes[axis]))), op.constant(steps[axis])
        )
        at = op.Add(op.Unsqueeze(within, op.ints(1)), firsts)
        apart = op.Gather(apart, at, axis=2 + 2 * axis)
    order = [0, 1, *range(2, 2 + 2 * count, 2), *range(3, 3 + 2 * count, 2)]
    return op.Reshape(op.Transpose(apart, perm=order), op.shape(x))
