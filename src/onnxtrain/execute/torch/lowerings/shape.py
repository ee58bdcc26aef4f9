"""Operators that move elements without computing; most are views."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("Reshape", host=(1,), view=True)
def reshape(x: Tensor, shape: Any, *, allowzero: int = 0) -> Tensor:
    """Zero copies a dimension, unless ``allowzero``."""
    if not allowzero and 0 in shape:
        shape = tuple(x.shape[i] if d == 0 else d for i, d in enumerate(shape))
    return x.reshape(shape)


@lowering("Flatten", view=True)
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """A matrix: axes before ``axis`` and the rest."""
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)


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
        if step > 0:
            size = x.shape[axis]
            start, end, _ = slice(start, end, step).indices(size)
            if start or end < size or step != 1:
                x = torch.ops.aten.slice.Tensor(x, axis, start, max(end, start), step)
        else:
            picked = range(x.shape[axis])[slice(start, None if end < -x.shape[axis] else end, step)]
            x = torch.index_select(x, axis, torch.tensor(list(picked), dtype=torch.int64, device=x.device))
    return x


@lowering("Pad", host=(1, 3), view=True)
def pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    """Padding per axis; negative pads cut."""
    axes = tuple(a % x.dim() for a in axes) if axes is not None else tuple(range(x.dim()))
    count, both = len(axes), [(0, 0)] * x.dim()
    for i, axis in enumerate(axes):
        both[axis] = (pads[i], pads[i + count])
    if mode == "constant":
        fill = 0 if value is None else value.item()
        return F.pad(x, [p for pair in reversed(both) for p in pair], value=fill)
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    first = next(i for i, pair in enumerate(both) if pair != (0, 0)) if any(p != (0, 0) for p in both) else x.dim() - 1
    flat = [p for pair in reversed(both[first:]) for p in pair]
    lead = x.dim() - len(flat) // 2
    shaped = x.reshape(-1, 1, *x.shape[lead:]) if lead != 2 else x
    made = F.pad(shaped, flat, mode=names[mode])
    return made.reshape(*x.shape[:lead], *made.shape[2:])


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
    axis = axis[0] if isinstance(axis, tuple) else axis
    source = torch.flip(x, (axis,)) if reverse else x
    total = torch.cumsum(source, axis, dtype=x.dtype)
    if exclusive and x.shape[axis]:
        before = total.narrow(axis, 0, x.shape[axis] - 1)
        total = torch.cat((torch.zeros_like(source.narrow(axis, 0, 1)), before), axis)
    return torch.flip(total, (axis,)) if reverse else total


@lowering("Shape")
def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    """The sizes as a tensor: only where their symbols do not say it already."""
    return torch.tensor(x.shape[start:end], dtype=torch.int64, device=x.device)


@lowering("Size")
def size_of(x: Tensor) -> Tensor:
    """The number of elements as a tensor."""
    return torch.tensor(x.numel(), dtype=torch.int64, device=x.device)


@lowering("SumToShape", domain=DOMAIN, host=(1,), view=True)
def sum_to_shape(x: Tensor, shape: Any) -> Tensor:
    """Sum over the axes that were broadcast."""
    return x.sum_to_size(shape)
