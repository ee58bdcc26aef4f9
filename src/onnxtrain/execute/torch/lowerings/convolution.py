"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.convolution import Window

Tensor = torch.Tensor
aten = torch.ops.aten


def padding_of(pads: Sequence[int]) -> tuple[int, ...] | None:
    """Pads as torch's operators take them, one number for both ends; None where the ends differ."""
    half = len(pads) // 2
    before = tuple(pads[:half])
    return before if before == tuple(pads[half:]) else None


def flat_pads(pads: Sequence[int], sign: int = 1) -> list[int]:
    """Pads as ``F.pad`` takes them: pairs, last axis first; negative ones cut."""
    half = len(pads) // 2
    return [sign * pads[i + end] for i in reversed(range(half)) for end in (0, half)]


@lowering("Conv")
def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """ATen's convolution; unequal padding is made before it."""
    window = Window.of(w.shape[2:], strides, dilations, pads, auto_pad)
    none = (0,) * len(window.kernel)
    if not x.shape[0]:  # ATen refuses even nothing where it is smaller than the kernel
        places = (max(n, 0) for n in window.output_sizes(x.shape[2:]))  # type: ignore[type-var]
        return x.new_empty((0, w.shape[0], *places))  # type: ignore[arg-type]
    given = window.paddings(x.shape[2:])
    padding = padding_of(given)
    if padding is None:
        x, padding = F.pad(x, flat_pads(given)), none
    return torch.convolution(x, w, b, window.strides, padding, window.dilations, False, none, group)


@lowering("ConvGrad", domain=DOMAIN)
def conv_grad(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    needed: Sequence[bool],
    group: int = 1,
) -> Tensor | tuple[Tensor | None, ...] | None:
    """ATen's kernels, for the gradients that are read."""
    if not x.shape[0]:
        made = torch.zeros_like(x), torch.zeros_like(w), w.new_zeros(w.shape[0])
        return made[0] if len(needed) == 1 else made[: len(needed)]
    none = (0,) * len(strides)
    padding = padding_of(pads)
    padded = F.pad(x, flat_pads(pads)) if padding is None else x
    mask = [*needed, False, False][:3]
    dx, dw, db = aten.convolution_backward(
        dy, padded, w, w.shape[:1], strides, padding or none, dilations, False, none, group, mask
    )
    if padding is None and dx is not None:
        dx = F.pad(dx, flat_pads(pads, -1))
    return dx if len(needed) == 1 else (dx, dw, db)[: len(needed)]


@lowering("ConvTranspose")
def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """ATen's transposed convolution; unequal padding is cut, or zeros are put, after it."""
    window = Window.of(w.shape[2:], strides, dilations, pads, auto_pad)
    none = (0,) * len(window.kernel)
    extra = tuple(output_padding or none)
    given = _transposed_pads(window, x.shape[2:], extra, output_shape)
    padding = padding_of(given)
    small = all(e < max(s, d) for e, s, d in zip(extra, window.strides, window.dilations, strict=True))
    if padding is not None and min(padding) >= 0 and small:
        return torch.convolution(x, w, b, window.strides, padding, window.dilations, True, extra, group)
    full = torch.convolution(x, w, None, window.strides, none, window.dilations, True, none, group)
    half = len(none)
    ends = [*given[:half], *(p - e for p, e in zip(given[half:], extra, strict=True))]
    y = F.pad(full, flat_pads(ends, -1))
    return y if b is None else y + b.reshape(-1, *(1,) * half)


def _transposed_pads(
    window: Window, sizes: Sequence[int], extra: Sequence[int], wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """What is cut from each end: as stated, or so that the result has the wanted size."""
    if wanted is None and window.pads is not None:
        return window.pads
    if wanted is None:
        wanted = [n * s for n, s in zip(sizes, window.strides, strict=True)]
    axes = zip(sizes, window.strides, window.reach, extra, list(wanted)[-len(extra) :], strict=True)
    totals = [(n - 1) * s + e + r - out for n, s, r, e, out in axes]
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return small + large if window.auto_pad == "SAME_UPPER" else large + small


@lowering("DeformConv")
def deform_conv(
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Samples of x where the moved kernel reads, times the mask, times the weight."""
    window = Window.of(w.shape[2:], strides, dilations, pads)
    height, width = offset.shape[2:]
    count = window.kernel[0] * window.kernel[1]
    moved = offset.reshape(-1, count, 2, height, width)
    kernel = torch.cartesian_prod(*(torch.arange(k, device=x.device) for k in window.kernel))
    grid = []
    for axis, size in enumerate((height, width)):
        first = kernel[:, axis] * window.dilations[axis] - window.paddings(x.shape[2:])[axis]
        steps = torch.arange(size, device=x.device) * window.strides[axis]
        at = first.view(-1, 1, 1) + (steps.view(-1, 1) if axis == 0 else steps)
        grid.append((2 * (moved[:, :, axis] + at) + 1) / x.shape[2 + axis] - 1)
    places = torch.stack(grid[::-1], -1).reshape(moved.shape[0], count * height, width, 2)
    planes = x.reshape(moved.shape[0], -1, *x.shape[2:])
    samples = torch.grid_sampler(planes, places, 0, 0, False)
    if mask is not None:
        samples = samples * mask.reshape(moved.shape[0], 1, count * height, width)
    columns = samples.reshape(x.shape[0], group, w[0].numel(), height * width)
    y = torch.matmul(w.reshape(group, -1, w[0].numel()), columns).reshape(x.shape[0], -1, height, width)
    return y if b is None else y + b.view(-1, 1, 1)
