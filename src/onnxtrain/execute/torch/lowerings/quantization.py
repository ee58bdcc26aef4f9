"""Quantization to integers and back, and in floating point."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Sequence

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


_CODES = (
    *(0.0, 0.005208333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25),
    *(0.0, -0.005208333, -0.6666667, -1.0, -0.33333334, -0.5, -0.16666667, -0.25),
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)  # what 4 bits stand for: FP4, then NF4
_CHUNK = 2**22  # elements of a weight that are there at once


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A weight in blocks of 4-bit codes.

    Args:
        packed: two codes in each byte.
        absmax: the scale of each block.
        shape: (N, K), of the weight.
        block_size: how many codes share a scale.
        quant_type: 0 for FP4, 1 for NF4.
    """

    packed: Tensor
    absmax: Tensor
    shape: Sequence[int]
    block_size: int
    quant_type: int

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of the weight after the other, each with where they are: never all of a large one at once."""
        count, width = self.shape
        whole = 2 * self.block_size // math.gcd(max(width, 1), 2 * self.block_size)  # rows that end with a block
        step = max(1, _CHUNK // max(width, 1) // whole) * whole
        for first in range(0, count, step):
            last = min(first + step, count)
            yield slice(first, last), self._rows(first, last, dtype)

    def _rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        width, size = self.shape[1], self.block_size
        packed = self.packed.flatten()[first * width // 2 : -(-last * width // 2)]
        absmax = self.absmax[first * width // size : -(-last * width // size)]
        shape = (last - first, width)
        if "bitsandbytes" in sys.modules and absmax.dtype == torch.float32 and dtype != torch.float64:
            kind = "nf4" if self.quant_type else "fp4"
            return torch.ops.bitsandbytes.dequantize_4bit(packed[:, None], absmax, size, kind, shape, dtype)
        code = torch.tensor(_CODES, dtype=torch.float32, device=packed.device)[16 * self.quant_type :].to(absmax.dtype)
        both = torch.stack((packed >> 4, packed & 15), -1).flatten()[: math.prod(shape)]
        scale = absmax.repeat_interleave(size)[: both.numel()]
        return (code[both.long()] * scale).to(dtype).view(shape)


@lowering("DequantizeBnb4", domain=DOMAIN)
def dequantize_4bit(
    packed: Tensor, absmax: Tensor, *, shape: Sequence[int], block_size: int = 64, quant_type: int = 1
) -> Tensor:
    """What the codes stand for."""
    weight = _Packed(packed, absmax, shape, block_size, quant_type)
    return torch.cat([rows for _, rows in weight.parts(absmax.dtype)])


@lowering("MatMulBnb4", domain=DOMAIN)
def matmul_4bit(
    x: Tensor, packed: Tensor, absmax: Tensor, *, shape: Sequence[int], block_size: int = 64, quant_type: int = 1
) -> Tensor:
    """x · Wᵀ."""
    return _product(x, shape, _Packed(packed, absmax, shape, block_size, quant_type).parts(x.dtype))


@lowering("MatMulBnb4Grad", domain=DOMAIN)
def matmul_4bit_grad(
    dy: Tensor, packed: Tensor, absmax: Tensor, *, shape: Sequence[int], block_size: int = 64, quant_type: int = 1
) -> Tensor:
    """dy · W."""
    return _product_back(dy, shape, _Packed(packed, absmax, shape, block_size, quant_type).parts(dy.dtype))


@lowering("MatMulInt8Weight", domain=DOMAIN)
def matmul_8bit(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x · Wᵀ, the scales last."""
    return _product(x, weight.shape, _rows_of_integers(weight, x.dtype)).mul_(scale)


@lowering("MatMulInt8WeightGrad", domain=DOMAIN)
def matmul_8bit_grad(dy: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """dy · W, the scales first."""
    return _product_back(dy * scale.to(dy.dtype), weight.shape, _rows_of_integers(weight, dy.dtype))


def _rows_of_integers(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    step = max(1, _CHUNK // max(weight.shape[1], 1))
    for first in range(0, weight.shape[0], step):
        yield slice(first, first + step), weight[first : first + step].to(dtype)


def _product(x: Tensor, shape: Sequence[int], parts: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """x · Wᵀ of a weight that comes in parts, each of some rows."""
    flat = x.reshape(-1, shape[1])
    y = flat.new_empty(flat.shape[0], shape[0])
    for place, rows in parts:
        torch.mm(flat, rows.t(), out=y[:, place])
        del rows  # before the next ones are made
    return y.view(*x.shape[:-1], shape[0])


def _product_back(dy: Tensor, shape: Sequence[int], parts: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """dy · W of such a weight; of several parts half types are added up in float32."""
    flat, sums = dy.reshape(-1, shape[0]), list[Tensor]()
    for place, rows in parts:
        made, is_part = flat[:, place] @ rows, rows.shape[0] < shape[0]
        del rows  # before the next ones are made
        if is_part:
            made = made.to(torch.promote_types(dy.dtype, torch.float32))
        sums = [sums[0].add_(made)] if sums else [made]
    return sums[0].to(dy.dtype).view(*dy.shape[:-1], shape[1])


def _along(value: Tensor, x: Tensor, axis: int) -> Tensor:
    """A value for each index of an axis, so that it broadcasts."""
    if value.dim() == 0 or x.dim() == 0:
        return value
    return value.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
