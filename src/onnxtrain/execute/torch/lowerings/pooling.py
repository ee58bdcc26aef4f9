"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.lowerings.convolution import flat_pads, padding_of
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.convolution import Window, transposed_sizes

Tensor = torch.Tensor
aten = torch.ops.aten
_MAX_POOL = {
    1: aten.max_pool1d_with_indices,
    2: aten.max_pool2d_with_indices,
    3: aten.max_pool3d_with_indices,
}


@lowering("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    needed: Sequence[bool],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """ATen's max_pool; its indices within each plane become indices into the whole operand.

    With ``storage_order`` they count column-major within the plane.
    """
    window = Window.of(kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    y, indices = _max_pool_planes(x, window)
    if len(needed) == 1:
        return y
    if storage_order:
        indices = _column_major(indices, x.shape[2:])
    return y, _across_planes(indices, x.shape, 1) if needed[1] else None


def _max_pool_planes(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Maxima and their indices within each plane."""
    given = window.paddings(x.shape[2:])
    find = _MAX_POOL[len(window.kernel)]
    padding = _pool_padding(given, window)
    if padding is not None:
        return find(x, window.kernel, window.strides, padding, window.dilations, window.ceil)
    framed, before = _frame(x, window, given, -math.inf)
    y, inner = find(framed, window.kernel, window.strides, (0,) * len(before), window.dilations)
    indices, factor = torch.zeros_like(inner), 1
    for wide, size, start in zip(reversed(framed.shape[2:]), reversed(x.shape[2:]), reversed(before), strict=True):
        indices += (inner % wide - start) * factor
        inner, factor = inner // wide, factor * size
    return y, indices


def _column_major(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    """Row-major indices within planes of these sizes as column-major ones."""
    made, factor = torch.zeros_like(indices), math.prod(sizes)
    for size in reversed(sizes):
        factor //= max(size, 1)
        made += (indices % size) * factor
        indices = indices // size
    return made


def _pool_padding(pads: Sequence[int], window: Window) -> tuple[int, ...] | None:
    """Pads as torch's pooling takes them: equal at both ends and at most half the kernel; None for others."""
    padding = padding_of(pads)
    fits = padding is not None and all(2 * p <= k for p, k in zip(padding, window.kernel, strict=True))
    return padding if fits else None


def _frame(x: Tensor, window: Window, pads: Sequence[int], fill: float) -> tuple[Tensor, tuple[int, ...]]:
    """X padded so that exactly the window's places fit, and what was put before each axis."""
    before = tuple(pads[: len(window.kernel)])
    framed = zip(_used_sizes(x.shape[2:], window), x.shape[2:], before, strict=True)
    after = [used - size - b for used, size, b in framed]
    return F.pad(x, flat_pads([*before, *after]), value=fill), before


def _used_sizes(sizes: Sequence[int], window: Window) -> list[int]:
    """The number of elements from the first to the last that the window's places reach, padding included."""
    axes = zip(window.output_sizes(sizes), window.strides, window.reach, strict=True)
    return [int((places - 1) * step + reach) for places, step, reach in axes]  # type: ignore[arg-type]


def _across_planes(indices: Tensor, shape: Sequence[int], sign: int) -> Tensor:
    """Indices within planes plus (or minus) the number of elements in the planes before."""
    count, planes = math.prod(shape[2:]), shape[0] * shape[1]
    starts = torch.arange(0, planes * count, max(count, 1), device=indices.device)
    return torch.add(indices, starts.view(*shape[:2], *(1,) * (len(shape) - 2)), alpha=sign)


@lowering("MaxPoolGrad", domain=DOMAIN, host=(2,))
def max_pool_grad(dy: Tensor, indices: Tensor, shape: Any) -> Tensor:
    """dy added plane by plane, in dy's memory format."""
    local = _across_planes(indices, shape, -1)
    batch, channels, count = shape[0], shape[1], math.prod(shape[2:])
    if dy.stride(1) == 1 and not dy.is_contiguous():
        planes = torch.zeros((batch, count, channels), dtype=dy.dtype, device=dy.device)
        rows = [t.movedim(1, -1).flatten(1, -2) for t in (local, dy)]
        return planes.scatter_add_(1, *rows).view(batch, *shape[2:], channels).movedim(-1, 1)
    planes = torch.zeros((batch * channels, count), dtype=dy.dtype, device=dy.device)
    rows = [t.flatten(0, 1).flatten(1) for t in (local, dy)]
    return planes.scatter_add_(1, *rows).view(shape)


@lowering("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """ATen's avg_pool; a convolution of ones over a count where ATen does not know the padding or dilation."""
    window = Window.of(kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    given = window.paddings(x.shape[2:])
    padding = _average_padding(given, window)
    if padding is not None:
        return _average(x, window, padding, window.ceil, count_include_pad)
    framed, _ = _frame(x, window, given, 0.0)
    summed = _sum_planes(framed, window)
    return summed / _averaged_elements(x.shape[2:], window, given, count_include_pad, x)


def _average_padding(pads: Sequence[int], window: Window) -> tuple[int, ...] | None:
    return _pool_padding(pads, window) if all(d == 1 for d in window.dilations) else None


def _average(x: Tensor, window: Window, padding: tuple[int, ...], ceil: bool, include: int) -> Tensor:
    pool = {1: torch.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(padding)]
    return pool(x, window.kernel, window.strides, padding, ceil, bool(include))


def _ones_kernel(window: Window, model: Tensor) -> Tensor:
    return torch.ones((1, 1, *window.kernel), dtype=model.dtype, device=model.device)


def _sum_planes(x: Tensor, window: Window) -> Tensor:
    none = (0,) * len(window.kernel)
    planes = x.flatten(0, 1).unsqueeze(1)
    kernel = _ones_kernel(window, x)
    y = torch.convolution(planes, kernel, None, window.strides, none, window.dilations, False, none, 1)
    return y.reshape(*x.shape[:2], *y.shape[2:])


def _averaged_elements(
    sizes: Sequence[int], window: Window, pads: Sequence[int], include: int, model: Tensor
) -> Tensor:
    """How many elements each mean is taken over."""
    ones = torch.ones((1, 1, *sizes), dtype=model.dtype, device=model.device)
    if include:
        ones = F.pad(ones, flat_pads(pads), value=1.0)
        after = [used - size for used, size in zip(_used_sizes(sizes, window), ones.shape[2:], strict=True)]
        return _sum_planes(F.pad(ones, flat_pads([*(0 for _ in after), *after])), window)
    return _sum_planes(_frame(ones, window, pads, 0.0)[0], window)


@lowering("AveragePoolGrad", domain=DOMAIN, host=(1, 2))
def average_pool_grad(
    dy: Tensor,
    shape: Any,
    pads: Any,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    count_include_pad: int = 0,
) -> Tensor:
    """ATen's kernel, which reads only the operand's shape; a transposed convolution of ones where it cannot."""
    window = Window.of(kernel_shape, strides, dilations, pads)
    ceil = window.output_sizes(shape[2:]) != tuple(dy.shape[2:])
    padding = _average_padding(pads, window)
    if padding is not None:
        return _average_grad(dy, shape, window, padding, ceil, count_include_pad)
    if ceil:
        window = Window.of(kernel_shape, strides, dilations, pads, ceil_mode=1)
    shares = dy / _averaged_elements(shape[2:], window, pads, count_include_pad, dy)
    return _spread_planes(shares, shape, pads, window)


@lowering("SumPoolGrad", domain=DOMAIN, host=(1, 2))
def sum_pool_grad(
    dy: Tensor,
    shape: Any,
    pads: Any,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Tensor:
    """A transposed convolution of ones."""
    return _spread_planes(dy, shape, pads, Window.of(kernel_shape, strides, dilations, pads))


def _spread_planes(dy: Tensor, shape: Any, pads: Sequence[int], window: Window) -> Tensor:
    none = (0,) * len(window.kernel)
    planes, kernel = dy.flatten(0, 1).unsqueeze(1), _ones_kernel(window, dy)
    full = torch.convolution(planes, kernel, None, window.strides, none, window.dilations, True, none, 1)
    half = len(none)
    after = [n - f + b for n, f, b in zip(shape[2:], full.shape[2:], pads[:half], strict=True)]
    return F.pad(full, flat_pads([*(-b for b in pads[:half]), *after])).reshape(shape)


def _average_grad(dy: Tensor, shape: Any, window: Window, padding: tuple[int, ...], ceil: bool, include: int) -> Tensor:
    """One dimension runs as two, of which the first has size 1."""
    kernel, strides = window.kernel, window.strides
    x = dy.new_empty(shape)
    if len(kernel) == 1:
        kernel, strides, padding = (1, *kernel), (1, *strides), (0, *padding)
        dx = aten.avg_pool2d_backward(
            dy.unsqueeze(2), x.unsqueeze(2), kernel, strides, padding, ceil, bool(include), None
        )
        return dx.squeeze(2)
    backward = aten.avg_pool2d_backward if len(kernel) == 2 else aten.avg_pool3d_backward
    return backward(dy, x, kernel, strides, padding, ceil, bool(include), None)


@lowering("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean of each channel."""
    return torch.mean(x, tuple(range(2, x.dim())), keepdim=True)


@lowering("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """The maximum of each channel."""
    return torch.amax(x, tuple(range(2, x.dim())), keepdim=True)


@lowering("LpPool")
def lp_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """The p-norm of each window."""
    window = Window.of(kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    framed, _ = _frame(x.abs() ** p, window, window.paddings(x.shape[2:]), 0.0)
    return _sum_planes(framed, window) ** (1.0 / p)


@lowering("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    """The p-norm of each channel."""
    return torch.linalg.vector_norm(x, p, tuple(range(2, x.dim())), keepdim=True)


@lowering("MaxUnpool", host=(2,))
def max_unpool(
    x: Tensor,
    indices: Tensor,
    shape: Any = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """X written into zeros at the indices, which count through the whole result, as in onnxruntime."""
    if shape is None:
        window = Window.of(kernel_shape, strides, None, pads)
        shape = (*x.shape[:2], *transposed_sizes(window, x.shape[2:]))
    zeros = torch.zeros(math.prod(shape), dtype=x.dtype, device=x.device)
    return zeros.scatter_(0, indices.reshape(-1), x.reshape(-1)).view(shape)
