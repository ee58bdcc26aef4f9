"""Quantization: values, and gradients that pass straight through inside of the range."""

from __future__ import annotations

import numpy as np
import torch

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Given, Tensor, x

LEVELS = np.random.default_rng(3).integers(-100, 100, (3, 4)).astype(np.int32)


def _quantization() -> list[Case]:
    scales, zeros = np.array([0.05, 0.1, 0.02, 0.03]), np.array([0.0, 3.0, -2.0, 1.0])
    points = zeros.astype(np.int8)

    def through(a: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
        level = (a / scale).round() + zero
        passed = a * ((level >= low) & (level <= high))
        return passed + ((level.clamp(low, high) - zero) * scale - passed).detach()

    def fake(a: Tensor) -> Tensor:
        return through(a, torch.tensor(0.02, dtype=a.dtype), torch.tensor(5), -64, 63)

    def each(a: Tensor) -> Tensor:
        return through(
            a, torch.tensor(scales, dtype=a.dtype)[:, None], torch.tensor(zeros, dtype=a.dtype)[:, None], -16, 15
        )

    def learned(a: Tensor, scale: Tensor) -> Tensor:
        level = a / scale
        level = level + (level.round() - level).detach()
        return ((level + 3).clamp(-16, 15) - 3) * scale

    def quantized(a: Tensor) -> Tensor:
        return (
            (torch.round(a / torch.tensor(scales, dtype=a.dtype)) + torch.tensor(points))
            .clamp(-128, 127)
            .to(torch.int8)
        )

    def dynamic(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = a.min().clamp(max=0), a.max().clamp(min=0)
        scale = (high - low) / 255
        zero = (-low / scale).round()
        return ((a / scale).round() + zero).clamp(0, 255).to(torch.uint8), scale, zero.to(torch.uint8)

    bounds = {"quant_min": -64, "quant_max": 63}
    return [
        Case("FakeQuant", (x(6, 4), np.array(0.02), np.array(5.0)), fake, bounds, DOMAIN),
        Case(
            "FakeQuant", (x(3, 4, 2), scales.reshape(4, 1), zeros.reshape(4, 1)), each,
            {"quant_min": -16, "quant_max": 15}, DOMAIN, label="channels",
        ),
        Case(
            "FakeQuant", (x(6, 4), Given((4,), 0.05, 0.2), np.array(3.0)), learned,
            {"quant_min": -16, "quant_max": 15}, DOMAIN, label="learned-scale",
        ),
        Case("QuantizeLinear", (x(3, 4), scales, points), quantized, differentiable=False),
        Case("DequantizeLinear", (LEVELS, x(), np.array(3, np.int32)), lambda s: (torch.tensor(LEVELS) - 3) * s),
        Case(
            "DequantizeLinear", (LEVELS, x(4)), lambda s: torch.tensor(LEVELS) * s, {"axis": 1},
            label="channels", static=(1,),
        ),
        Case("DynamicQuantizeLinear", (x(5, 3),), dynamic, outputs=3, differentiable=False),
    ]  # fmt: skip


CASES = [*_quantization()]
