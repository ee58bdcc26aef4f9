"""Normalizations other than those of layers and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """One number for each channel; opset 18 gives one for each group."""
    return values if values.numel() == channels else values.repeat_interleave(channels // values.numel())


@lowering("GroupNormalization")
def group_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """ATen's kernel."""
    channels = x.shape[1]
    return F.group_norm(x, num_groups, _per_channel(scale, channels), _per_channel(bias, channels), epsilon)


@lowering("GroupNormalizationGrad", domain=DOMAIN)
def group_normalization_grad(
    dy: Tensor, x: Tensor, scale: Tensor, *, needed: Sequence[bool], num_groups: int, epsilon: float = 1e-5
) -> Tensor | tuple[Tensor | None, ...]:
    """ATen's kernel, for the gradients that are read."""
    batch, channels = x.shape[:2]
    variance, mean = torch.var_mean(x.reshape(batch, num_groups, -1), 2, correction=0)
    dx, dscale, dbias = aten.native_group_norm_backward(
        dy.contiguous(),
        x.contiguous(),
        mean,
        torch.rsqrt(variance + epsilon),
        _per_channel(scale, channels),
        batch,
        channels,
        x[0, 0].numel(),
        num_groups,
        [*needed, False, False][:3],
    )
    sums = [None if s is None else s.view(scale.numel(), -1).sum(1) for s in (dscale, dbias)]
    return dx if len(needed) == 1 else (dx, *sums)[: len(needed)]


@lowering("RMSNorm", domain=DOMAIN)
@lowering("RMSNormalization")
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """ATen's kernel, on a GPU; the CPU has none, and computes half precision in float32."""
    sizes = x.shape[axis:]
    if x.device.type == "cpu" and x.dtype not in (torch.float16, torch.bfloat16):
        x = x.contiguous()
        return (x * _inverse_rms(x, len(sizes), epsilon)).mul_(scale)
    if scale.shape == sizes:
        return torch.rms_norm(x, sizes, scale, epsilon)
    return torch.rms_norm(x, sizes, None, epsilon) * scale


def _inverse_rms(x: Tensor, axes: int, epsilon: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + epsilon)`` over that many last axes, which it keeps, in one pass over x."""
    over = tuple(range(-axes, 0))
    norm = torch.linalg.vector_norm(x, 2, over, keepdim=True)
    return (norm.square() / math.prod(x.shape[-axes:]) + epsilon).rsqrt()


@lowering("RMSNormalizationGrad", domain=DOMAIN)
def rms_normalization_grad(
    dy: Tensor, x: Tensor, scale: Tensor, *, needed: Sequence[bool], axis: int = -1, epsilon: float = 1e-5
) -> Tensor | tuple[Tensor | None, ...]:
    """For the gradients that are read; LayerNormalization's kernel, of a mean of 0, computes most of it in one pass.

    That kernel subtracts the mean of ``dy * scale`` from the gradient of x, which is added again.
    """
    sizes = x.shape[axis:]
    inv_rms = _inverse_rms(x, len(sizes), epsilon)
    if scale.shape == sizes and x.numel() and needed[0]:
        mask = [True, len(needed) > 1 and needed[1], False]
        none = torch.zeros_like(inv_rms)
        dx, dscale, _ = aten.native_layer_norm_backward(dy, x, sizes, none, inv_rms, scale, None, mask)
        mean = (dy.flatten(axis) @ scale.flatten()).view(inv_rms.shape)
        dx = dx.addcmul_(inv_rms, mean, value=1 / scale.numel())
        return dx if len(needed) == 1 else (dx, dscale)
    axes = tuple(range(axis % x.dim(), x.dim()))
    n = x * inv_rms
    dscale = (dy * n).sum_to_size(scale.shape) if len(needed) > 1 and needed[1] else None
    if not needed[0]:
        return None, dscale
    g = dy * scale
    dx = n.mul_((g * n).mean(axes, keepdim=True)).neg_().add_(g).mul_(inv_rms)
    return dx if len(needed) == 1 else (dx, dscale)


@lowering("MeanVarianceNormalization")
def mean_variance_normalization(x: Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> Tensor:
    """(x - mean) / (deviation + 1e-9)."""
    variance, mean = torch.var_mean(x, tuple(axes), correction=0, keepdim=True)
    return (x - mean) / (variance.sqrt() + 1e-9)


@lowering("MeanVarianceNormalizationGrad", domain=DOMAIN)
def mean_variance_normalization_grad(dy: Tensor, x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """The formula of the operator's body."""
    over = tuple(axes)
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    c, s = x - mean, variance.sqrt()
    divisor = s + 1e-9
    slope = (dy * c).mean(over, keepdim=True) / torch.where(s == 0, 1.0, s * divisor)
    dc = (dy - c * torch.where(s == 0, 0.0, slope)) / divisor
    return dc - dc.mean(over, keepdim=True)


@lowering("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """X over its norm along an axis; 0 where the norm is 0."""
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


def _neighbours(x: Tensor, before: int, size: int) -> Tensor:
    """Sums over ``size`` channels, of which ``before`` come before the channel itself."""
    flat = x.flatten(2).unsqueeze(1)
    framed = F.pad(flat, (0, 0, before, size - 1 - before))
    return F.avg_pool2d(framed, (size, 1), 1, divisor_override=1).reshape(x.shape)


@lowering("LRN")
def lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """X by a power of the sum of squares of neighbouring channels."""
    return x * (bias + alpha / size * _neighbours(x * x, (size - 1) // 2, size)) ** -beta


@lowering("LRNGrad", domain=DOMAIN)
def lrn_grad(dy: Tensor, x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """The formula of the operator's body."""
    before = (size - 1) // 2
    base = bias + alpha / size * _neighbours(x * x, before, size)
    scaled = dy * base**-beta
    return scaled - 2 * alpha * beta / size * x * _neighbours(scaled * x / base, size - 1 - before, size)
