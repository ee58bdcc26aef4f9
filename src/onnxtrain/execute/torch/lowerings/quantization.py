"""Quantization to integers and back, and in floating point."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("FakeQuant", domain=DOMAIN)
def fake_quant(x: Tensor, scale: Tensor, zero_point: Tensor, *, quant_min: int = -128, quant_max: int = 127) -> Tensor:
    """What integers of a scale can say."""
    level = torch.round(x / scale).add_(zero_point).clamp_(quant_min, quant_max)
    return level.sub_(zero_point).mul_(scale)


@lowering("FakeQuantGrad", domain=DOMAIN)
def fake_quant_grad(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *, quant_min: int = -128, quant_max: int = 127
) -> Tensor:
    """dy inside of the range."""
    level = torch.round(x / scale).add_(zero_point)
    return torch.where((level >= quant_min) & (level <= quant_max), dy, 0.0)


@lowering("QuantizeLinear")
def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1, dtype: int = 0, **_: int
) -> Tensor:
    """Rounded half to even, and bounded by the integer type."""
    bounds = torch.iinfo(torch_dtype(dtype))
    level = torch.round(x / _along(scale, x, axis))
    level = level if zero_point is None else level + _along(zero_point, x, axis)
    return level.clamp(bounds.min, bounds.max).to(torch_dtype(dtype))


@lowering("DequantizeLinear")
def dequantize(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1, **_: int) -> Tensor:
    """``(x - zero_point) * scale``."""
    level = x.to(scale.dtype)
    level = level if zero_point is None else level - _along(zero_point, x, axis).to(scale.dtype)
    return level * _along(scale, x, axis)


@lowering("DynamicQuantizeLinear")
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To uint8 by the range of x, zero included; the scale and the zero point come too."""
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    scale = (high - low) / 255
    zero_point = torch.round(-low / scale).clamp(0, 255)
    y = (torch.round(x / scale) + zero_point).clamp(0, 255)
    return y.to(torch.uint8), scale, zero_point.to(torch.uint8)


def _along(value: Tensor, x: Tensor, axis: int) -> Tensor:
    """A value for each index of an axis, so that it broadcasts."""
    if value.dim() == 0 or x.dim() == 0:
        return value
    return value.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
