"""Quantization: values, and gradients that pass straight through inside of the range."""

from __future__ import annotations

from typing import Any

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


TABLES = torch.tensor(
    [
        *(0.0, 0.005208333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25),
        *(0.0, -0.005208333, -0.6666667, -1.0, -0.33333334, -0.5, -0.16666667, -0.25),
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
).view(2, 16)  # of bitsandbytes: FP4, NF4


def _codes() -> list[Case]:
    """Products with weights of 4 and of 8 bits, which are frozen."""

    def form(shape: tuple[int, int], size: int, kind: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any], Any]:
        random, count = np.random.default_rng(sum(shape) + kind), shape[0] * shape[1]
        packed = random.integers(0, 256, (-(-count // 2), 1)).astype(np.uint8)
        scales = random.uniform(0.5, 2.0, -(-count // size))
        codes = np.stack([packed[:, 0] >> 4, packed[:, 0] & 15], -1).reshape(-1)[:count]

        def weight(like: Tensor) -> Tensor:
            scale = torch.tensor(np.repeat(scales, size)[:count], dtype=like.dtype)
            return (TABLES[kind][torch.tensor(codes, dtype=torch.int64)].to(like.dtype) * scale).view(shape)

        return packed, scales, {"shape": list(shape), "block_size": size, "quant_type": kind}, weight

    rows = []
    for label, given in (("fp4", ((6, 8), 16, 0)), ("nf4", ((6, 8), 16, 1)), ("odd", ((3, 5), 4, 1))):
        packed, scales, attributes, weight = form(*given)
        (count, width), own = given[0], {"domain": DOMAIN, "label": label}
        rows += [
            Case("DequantizeBnb4", (packed, scales), lambda w=weight: w(torch.ones((), dtype=torch.float64)), attributes,
                 differentiable=False, **own),
            Case("MatMulBnb4", (x(2, 3, width), packed, scales), lambda a, w=weight: a @ w(a).T, attributes, **own),
            Case("MatMulBnb4Grad", (x(2, count), packed, scales), lambda a, w=weight: a @ w(a), attributes, **own),
        ]  # fmt: skip
    levels = np.random.default_rng(7).integers(-127, 128, (5, 4)).astype(np.int8)
    scales = np.random.default_rng(8).uniform(0.01, 0.02, 5)

    def integers(like: Tensor) -> Tensor:
        return torch.tensor(levels, dtype=like.dtype) * torch.tensor(scales, dtype=like.dtype)[:, None]

    return [
        *rows,
        Case("MatMulInt8Weight", (x(2, 3, 4), levels, scales), lambda a: a @ integers(a).T, domain=DOMAIN),
        Case("MatMulInt8WeightGrad", (x(3, 5), levels, scales), lambda a: a @ integers(a), domain=DOMAIN),
    ]


CASES = [*_quantization(), *_codes()]
