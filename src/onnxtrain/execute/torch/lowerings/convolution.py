"""Convolution, pooling and BatchNorm by ATen's kernels in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.errors import BackendError
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pads(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Any, auto_pad: str
) -> list[tuple[int, int]]:
    """Padding before and after each spatial axis (ONNX's auto_pad rule for SAME)."""
    count = len(kernel)
    if auto_pad == "NOTSET" and pads is not None:
        return [(pads[i], pads[i + count]) for i in range(count)]
    if not auto_pad.startswith("SAME"):
        return [(0, 0)] * count
    found = []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
    return found


def _symmetric(x: Tensor, pads: list[tuple[int, int]], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """The input and the padding a kernel can add itself; uneven padding is added before."""
    if all(before == after for before, after in pads):
        return x, [before for before, _ in pads]
    return F.pad(x, [p for pair in reversed(pads) for p in pair], value=value), [0] * len(pads)


@lowering("Conv")
def conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """Convolution over 1 to 3 spatial axes."""
    count = x.dim() - 2
    strides, dilations = strides or (1,) * count, dilations or (1,) * count
    x, padding = _symmetric(x, _pads(x, w.shape[2:], strides, dilations, pads, auto_pad))
    return _CONV[count](x, w, bias, strides, padding, dilations, group)


@lowering("ConvGrad", domain=DOMAIN)
def conv_grad(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    *,
    strides: Any,
    pads: Any,
    dilations: Any,
    group: int = 1,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """ATen's kernel; only the gradients that are read are computed."""
    both = _pads(x, w.shape[2:], strides, dilations, pads, "NOTSET")
    wide, padding = _symmetric(x, both)
    mask = [*needed, False][:3]
    made = aten.convolution_backward(
        dy, wide, w, [w.shape[0]], strides, padding, dilations, False, [0] * len(both), group, mask
    )
    if wide is not x and made[0] is not None:
        made = (F.pad(made[0], [-p for pair in reversed(both) for p in pair]), *made[1:])
    return tuple(made[: len(needed)])


@lowering("ConvTranspose")
def conv_transpose(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    output_padding: Any = None,
    output_shape: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """Transposed convolution over 1 to 3 spatial axes."""
    count = x.dim() - 2
    if output_shape is not None or auto_pad.startswith("SAME"):
        raise BackendError("ConvTranspose with output_shape or auto_pad is not available", cure="state pads instead")
    strides, dilations = strides or (1,) * count, dilations or (1,) * count
    both = [(pads[i], pads[i + count]) for i in range(count)] if pads else [(0, 0)] * count
    extra = output_padding or (0,) * count
    full = _CONV_TRANSPOSE[count](x, w, bias, strides, 0, 0, group, dilations)
    return F.pad(full, [p for pair, e in zip(both[::-1], extra[::-1], strict=True) for p in (-pair[0], e - pair[1])])


@lowering("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: Any,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
    storage_order: int = 0,
    auto_pad: str = "NOTSET",
    outputs: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest element of each window; indices are flat over the whole tensor."""
    count = len(kernel_shape)
    strides, dilations = strides or (1,) * count, dilations or (1,) * count
    wide, padding = _symmetric(x, _pads(x, kernel_shape, strides, dilations, pads, auto_pad), float("-inf"))
    if outputs == 1:
        return _MAX_POOL[count](wide, kernel_shape, strides, padding, dilations, bool(ceil_mode))
    if wide is not x:
        raise BackendError("MaxPool with uneven pads has no indices", cure="pad before pooling")
    y, indices = _MAX_POOL[count](x, kernel_shape, strides, padding, dilations, bool(ceil_mode), return_indices=True)
    planes = torch.arange(0, x.numel(), max(x.shape[2:].numel(), 1), device=x.device)
    return y, indices + planes.reshape(*x.shape[:2], *[1] * count)


@lowering("MaxPoolGrad", domain=DOMAIN, host=(2,))
def max_pool_grad(dy: Tensor, indices: Tensor, shape: Any) -> Tensor:
    """Dy added at the flat indices."""
    total = torch.Size(shape).numel()
    zeros = torch.zeros(total, dtype=dy.dtype, device=dy.device)
    return zeros.scatter_add_(0, indices.reshape(-1), dy.reshape(-1)).reshape(shape)


@lowering("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: Any,
    strides: Any = None,
    pads: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """The mean of each window."""
    count = len(kernel_shape)
    strides = strides or (1,) * count
    both = _pads(x, kernel_shape, strides, (1,) * count, pads, auto_pad)
    wide, padding = _symmetric(x, both)
    y = _AVERAGE_POOL[count](wide, kernel_shape, strides, padding, bool(ceil_mode), bool(count_include_pad))
    if wide is x or count_include_pad:
        return y
    inside = _symmetric(torch.ones_like(x[:1, :1]), both)[0]
    return y / _AVERAGE_POOL[count](inside, kernel_shape, strides, padding, bool(ceil_mode), True)


@lowering("AveragePoolGrad", domain=DOMAIN)
def average_pool_grad(
    dy: Tensor, x: Tensor, *, kernel_shape: Any, strides: Any, pads: Any, count_include_pad: int = 0
) -> Tensor:
    """The vector-Jacobian product that autograd takes of the forward kernel."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = average_pool(
            leaf, kernel_shape=kernel_shape, strides=strides, pads=pads, count_include_pad=count_include_pad
        )
        return torch.autograd.grad(y, leaf, dy)[0]


@lowering("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean of each plane."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@lowering("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """The largest element of each plane."""
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


@lowering("BatchNormTraining", domain=DOMAIN)
def batch_norm_training(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    outputs: int = 1,
) -> Tensor | tuple[Tensor, ...]:
    """Batch statistics; the running ones come back as new tensors."""
    y, mean, inv_std, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, scale, bias, running_mean, running_var, True, momentum, epsilon
    )
    made = (y, new_mean, new_var, mean, inv_std)
    return y if outputs == 1 else made[:outputs]


@lowering("BatchNormTrainingGrad", domain=DOMAIN)
def batch_norm_training_grad(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, inv_std: Tensor, *, outputs: int = 3
) -> tuple[Tensor, ...] | Tensor:
    """ATen's kernel."""
    made = aten.native_batch_norm_backward(dy, x, scale, None, None, mean, inv_std, True, 0.0, [True] * 3)
    return made[0] if outputs == 1 else made[:outputs]


@lowering("BatchNormalization")
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    outputs: int = 1,
) -> Tensor:
    """Running statistics, as in evaluation."""
    if training_mode or outputs > 1:
        raise BackendError("BatchNormalization with training_mode=1 is not available", cure="use BatchNormTraining")
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
