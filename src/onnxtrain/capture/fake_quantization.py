"""Simulated quantization while a module is traced: torch shows a step of it that knows no shapes."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor
_SCHEMA = "(Tensor x, Tensor scale, Tensor zero_point, int? axis, int quant_min, int quant_max) -> Tensor"


@torch.library.custom_op("onnxtrain::fake_quantize", mutates_args=(), schema=_SCHEMA)
def _fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, *bounds: int) -> Tensor:
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *bounds)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, *bounds)


@_fake_quantize.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@substitute(torch.fake_quantize_per_tensor_affine)
def fake_quantize_per_tensor(
    input: Tensor, scale: Tensor | float, zero_point: Tensor | int, quant_min: int, quant_max: int
) -> Any:
    """One operator; torch gives no gradient to the scale and the zero point."""
    if not isinstance(scale, Tensor):
        scale = torch.scalar_tensor(scale, device=input.device)
    if not isinstance(zero_point, Tensor):
        zero_point = torch.scalar_tensor(zero_point, dtype=torch.int32, device=input.device)
    return _operator(input, scale, zero_point, None, quant_min, quant_max)


@substitute(torch.fake_quantize_per_channel_affine)
def fake_quantize_per_channel(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Any:
    """The same with a scale and a zero point for each index of an axis."""
    return _operator(input, scale, zero_point, axis, quant_min, quant_max)


def _operator(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, *bounds: int) -> Any:
    if zero_point.is_floating_point():  # which torch adds before it rounds
        return NotImplemented
    return torch.ops.onnxtrain.fake_quantize(x, scale, zero_point, axis, *bounds)
