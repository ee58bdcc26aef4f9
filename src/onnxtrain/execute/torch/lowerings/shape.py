"""Operators that move elements without computing; most are views."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten


@lowering("Reshape", host=(1,), view=True)
def reshape(x: Tensor, shape: Any, *, allowzero: int = 0) -> Tensor:
    """Zero copies a dimension, unless ``allowzero``."""
    if not allowzero and 0 in shape:
        shape = tuple(x.shape[i] if d == 0 else d for i, d in enumerate(shape))
    if 0 in shape and -1 in shape:
        shape = _without_rest(x.shape, shape)
    return x.reshape(shape)


def _without_rest(have: Any, shape: Any) -> tuple[int, ...]:
    """The shape of an empty tensor, where torch cannot tell -1: what it would be if the empty axes were not there."""
    full, named = (int(np.prod([d for d in sizes if d > 0], dtype=np.int64)) for sizes in (have, shape))
    return tuple(full // named if d == -1 else d for d in shape)


@lowering("Flatten", view=True)
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """A matrix: axes before ``axis`` and the rest."""
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@lowering("Transpose", view=True)
def transpose(x: Tensor, *, perm: Any = None) -> Tensor:
    """Axes in another order."""
    return x.permute(perm if perm is not None else tuple(range(x.dim() - 1, -1, -1)))


@lowering("Squeeze", host=(1,), view=True)
def squeeze(x: Tensor, axes: Any = None) -> Tensor:
    """Axes of size 1 dropped."""
    return torch.squeeze(x) if axes is None else torch.squeeze(x, axes)


@lowering("Unsqueeze", host=(1,), view=True)
def unsqueeze(x: Tensor, axes: Any) -> Tensor:
    """Axes of size 1 added."""
    total = x.dim() + len(axes)
    for axis in sorted(a % total for a in axes):
        x = x.unsqueeze(axis)
    return x


@lowering("Expand", host=(1,), view=True)
def expand(x: Tensor, shape: Any) -> Tensor:
    """Broadcast to a shape, whose sizes of 1 leave x's."""
    if x.dim() <= len(shape) and 1 not in shape:
        return x.expand(shape)
    return x.expand(torch.broadcast_shapes(x.shape, shape))


@lowering("Concat")
def concat(*parts: Tensor, axis: int) -> Tensor:
    """The parts side by side."""
    return torch.cat(parts, axis)


@lowering("Split", host=(1,), view=True)
def split(x: Tensor, sizes: Any = None, *, outputs: int, axis: int = 0, num_outputs: int | None = None) -> Any:
    """Given sizes, or equal parts of which the last may be smaller."""
    if sizes is None:
        part = -(-x.shape[axis] // outputs)
        sizes = (part,) * (outputs - 1) + (x.shape[axis] - part * (outputs - 1),)
    made = torch.split(x, list(sizes), axis)
    return made[0] if outputs == 1 else made


@lowering("Slice", host=(1, 2, 3, 4), view=True)
def slice_(x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    """Python's slices; negative steps gather."""
    axes = range(len(starts)) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        taken = _taken(x.shape[axis], start, end, step)
        if step < 0:
            x = torch.index_select(x, axis, torch.tensor(list(taken), dtype=torch.int64, device=x.device))
        elif taken != range(x.shape[axis]):
            x = aten.slice.Tensor(x, axis, taken.start, max(taken.stop, taken.start), step)
    return x


def _taken(size: int, start: int, end: int, step: int) -> range:
    """Which elements of an axis a slice takes; going back, ONNX begins at the first element where Python would not."""
    if step > 0:
        return range(size)[start:end:step]
    return range(size)[max(start, -size) : None if end < -size else end : step]


@lowering("SliceGrad", domain=DOMAIN, host=(1, 2, 3, 4, 5))
def slice_grad(dy: Tensor, shape: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Tensor:
    """dy written to the slice of zeros, whose axes taken backwards are turned."""
    dx = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    place = dx
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        taken = _taken(place.shape[axis], start, end, step)
        if step < 0:
            taken, dy = taken[::-1], torch.flip(dy, (axis,))
        place = aten.slice.Tensor(place, axis, taken.start, max(taken.stop, taken.start), abs(step))
    place.copy_(dy)
    return dx


@lowering("Pad", host=(1, 2, 3), view=True)
def pad(x: Tensor, pads: Any, value: float | None = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    """Padding per axis; negative pads cut. The modes that repeat x take its elements axis by axis."""
    axes = tuple(a % x.dim() for a in axes) if axes is not None else tuple(range(x.dim()))
    both = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
    if mode == "constant":
        return F.pad(x, [p for axis in reversed(range(x.dim())) for p in both.get(axis, (0, 0))], value=value or 0)
    for axis, (before, after) in both.items():
        if before or after:
            x = torch.index_select(x, axis, _repeated(x.shape[axis], before, after, mode, x.device))
    return x


def _repeated(size: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    """The elements of an axis that padding it takes; what negative pads cut is not there to be repeated."""
    cut = max(-before, 0)
    kept = size - cut - max(-after, 0)
    at = torch.arange(-max(before, 0), kept + max(after, 0), device=device)
    if mode == "edge":
        return at.clamp(0, kept - 1) + cut
    if mode == "wrap":
        return at.remainder(kept) + cut
    period = max(2 * (kept - 1), 1)
    at = at.remainder(period)
    return torch.where(at < kept, at, period - at) + cut


@lowering("PadGrad", domain=DOMAIN, host=(1, 2), view=True)
def pad_grad(dy: Tensor, shape: Any, pads: Any, *, mode: str) -> Tensor:
    """Per axis, dy added at the elements that the padding took."""
    count = len(shape)
    for axis, (before, after) in enumerate(zip(pads[:count], pads[count:], strict=True)):
        if before or after:
            taken = _repeated(shape[axis], before, after, mode, dy.device)
            sizes = [shape[axis] if i == axis else d for i, d in enumerate(dy.shape)]
            dy = torch.zeros(sizes, dtype=dy.dtype, device=dy.device).index_add_(axis, taken, dy)
    return dy


@lowering("Tile", host=(1,), view=True)
def tile(x: Tensor, repeats: Any) -> Tensor:
    """Copies side by side."""
    return x.repeat(repeats) if len(repeats) else x


@lowering("Trilu", host=(1,))
def trilu(x: Tensor, k: Any = 0, *, upper: int = 1) -> Tensor:
    """A triangle of the last two axes."""
    k = 0 if k is None else k[0] if isinstance(k, tuple) else k
    return torch.triu(x, k) if upper else torch.tril(x, k)


@lowering("CumSum", host=(1,), view=True)
def cum_sum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running sums, from either end, with or without the element itself."""
    return _running(torch.cumsum, 0, x, axis, exclusive, reverse)


@lowering("CumProd", host=(1,), view=True)
def cum_prod(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running products, as CumSum's sums."""
    return _running(torch.cumprod, 1, x, axis, exclusive, reverse)


def _running(function: Any, start: int, x: Tensor, axis: Any, exclusive: int, reverse: int) -> Tensor:
    axis = axis[0] if isinstance(axis, tuple) else axis
    source = torch.flip(x, (axis,)) if reverse else x
    total = function(source, axis, dtype=x.dtype)
    if exclusive and x.shape[axis]:
        before = total.narrow(axis, 0, x.shape[axis] - 1)
        total = torch.cat((torch.full_like(source.narrow(axis, 0, 1), start), before), axis)
    return torch.flip(total, (axis,)) if reverse else total


@lowering("Shape")
def shape_of(x: Tensor, *, device: str, start: int = 0, end: int | None = None) -> Tensor:
    """The sizes as a tensor: only where their symbols do not say it already."""
    return torch.tensor(x.shape[start:end], dtype=torch.int64, device=device)


@lowering("Size")
def size_of(x: Tensor, *, device: str) -> Tensor:
    """The number of elements as a tensor."""
    return torch.tensor(x.numel(), dtype=torch.int64, device=device)


@lowering("SumToShape", domain=DOMAIN, host=(1,), view=True)
def sum_to_shape(x: Tensor, shape: Any) -> Tensor:
    """Sum over the axes that were broadcast."""
    return x.sum_to_size(shape)


@lowering("DepthToSpace", view=True)
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels laid out as blocks: the block's place varies slowest in the channels (DCR) or fastest (CRD)."""
    n, c, h, w = x.shape
    b, rest = blocksize, c // blocksize**2
    if mode == "CRD":
        parts = x.reshape(n, rest, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    else:
        parts = x.reshape(n, b, b, rest, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, rest, h * b, w * b)


@lowering("SpaceToDepth", view=True)
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks laid out as channels, the block's place varying slowest (DCR) or fastest (CRD)."""
    n, c, h, w = x.shape
    b = blocksize
    order = (0, 1, 3, 5, 2, 4) if mode == "CRD" else (0, 3, 5, 1, 2, 4)
    parts = x.reshape(n, c, h // b, b, w // b, b).permute(order)
    return parts.reshape(n, c * b * b, h // b, w // b)


@lowering("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """The first ``lengths[i]`` steps of each batch entry in the opposite order."""
    rows = x.movedim((batch_axis, time_axis), (0, 1))
    step = torch.arange(rows.shape[1], device=x.device)
    last = lengths.unsqueeze(1) - 1
    at = torch.where(step <= last, last - step, step)
    turned = rows[torch.arange(rows.shape[0], device=x.device).unsqueeze(1), at]
    return turned.movedim((0, 1), (batch_axis, time_axis))


@lowering("CenterCropPad", host=(1,), view=True)
def center_crop_pad(x: Tensor, shape: Any, *, axes: Any = None) -> Tensor:
    """The middle of each axis, or zeros around it; of an odd difference the larger half comes after."""
    for axis, size in zip(axes if axes is not None else range(x.dim()), shape, strict=True):
        have = x.shape[axis]
        if size < have:
            x = x.narrow(axis, (have - size) // 2, size)
        elif size > have:
            before = (size - have) // 2
            behind = x.dim() - 1 - axis % x.dim()
            x = F.pad(x, (0, 0) * behind + (before, size - have - before))
    return x


@lowering("Col2Im", host=(1, 2))
def col2im(
    x: Tensor, image: Any, block: Any, *, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Tensor:
    """Columns added up as windows of an image: per axis one addition by (place in the window, window) pairs."""
    count = len(image)
    steps, holes, margins = strides or (1,) * count, dilations or (1,) * count, pads or (0,) * 2 * count
    at = []
    for d in range(count):
        wide = image[d] + margins[d] + margins[d + count]
        within = torch.arange(block[d], device=x.device) * holes[d]
        firsts = torch.arange(0, wide - (block[d] - 1) * holes[d], steps[d], device=x.device)
        at.append((wide, within.unsqueeze(1) + firsts))
    channels = x.shape[1] // math.prod(block)
    y = x.reshape(x.shape[0], channels, *block, *(a.shape[1] for _, a in at))
    y = y.permute(0, 1, *(2 + i // 2 + i % 2 * count for i in range(2 * count)))
    for d, (wide, a) in enumerate(at):
        y = y.reshape(*y.shape[: 2 + d], a.numel(), *y.shape[4 + d :])
        y = torch.zeros(*y.shape[: 2 + d], wide, *y.shape[3 + d :], dtype=x.dtype, device=x.device).index_add_(
            2 + d, a.reshape(-1), y
        )
        y = y.narrow(2 + d, margins[d], image[d])
    return y
