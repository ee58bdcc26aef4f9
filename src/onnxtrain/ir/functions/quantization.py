"""Quantization in floating point: values rounded to what integers of a scale can say."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.ir.functions import function, op, own


@function(like=(0,))
def FakeQuant(x, scale, zero_point, quant_min: int = -128, quant_max: int = 127):
    """``(clip(round(x / scale) + zero_point, quant_min, quant_max) - zero_point) * scale``.

    scale and zero_point have x's type and broadcast to it: a number for the tensor, or one for each channel.
    """
    low = op.CastLike(op.Constant(value_int=quant_min), x)
    high = op.CastLike(op.Constant(value_int=quant_max), x)
    return (op.Min(op.Max(op.Round(x / scale) + zero_point, low), high) - zero_point) * scale


@function(like=(0,))
def FakeQuantGrad(dy, x, scale, zero_point, quant_min: int = -128, quant_max: int = 127):
    """Gradient of FakeQuant: dy inside the range, 0 outside; rounding is passed straight through."""
    low = op.CastLike(op.Constant(value_int=quant_min), x)
    high = op.CastLike(op.Constant(value_int=quant_max), x)
    level = op.Round(x / scale) + zero_point
    inside = op.And(op.GreaterOrEqual(level, low), op.LessOrEqual(level, high))
    return op.Where(inside, dy, op.CastLike(op.Constant(value_float=0.0), dy))


@function()
def DequantizeBnb4(packed, absmax, shape: Sequence[int] = (), block_size: int = 64, quant_type: int = 1):
    """What blocks of 4-bit codes stand for: ``table[code] * absmax[place // block_size]``, of absmax's type.

    packed (uint8) has two codes in a byte, the first in its higher half; the table is FP4's where quant_type is 0, and
    NF4's where it is 1 (QLoRA, arXiv 2305.14314, appendix E).
    """
    tables = op.Constant(
        value_floats=[
            0.0, 0.005208333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25,
            0.0, -0.005208333, -0.6666667, -1.0, -0.33333334, -0.5, -0.16666667, -0.25,
            -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
            0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
        ]
    )  # fmt: skip
    last, sixteen = op.Constant(value_ints=[-1]), op.Constant(value_int=16)
    both = op.Cast(op.Reshape(packed, last), to=7)
    high = both / sixteen
    low = both - high * sixteen
    codes = op.Reshape(op.Concat(op.Unsqueeze(high, last), op.Unsqueeze(low, last), axis=-1), last)
    sizes = op.Constant(value_ints=shape)
    count = op.ReduceProd(sizes, keepdims=1)
    codes = op.Slice(codes, op.Constant(value_ints=[0]), count)
    numbers = op.CastLike(op.Gather(tables, codes + op.Constant(value_int=quant_type) * sixteen), absmax)
    places = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    return op.Reshape(numbers * op.Gather(absmax, places / op.Constant(value_int=block_size)), sizes)


@function()
def MatMulBnb4(x, packed, absmax, shape: Sequence[int] = (), block_size: int = 64, quant_type: int = 1):
    """x · Wᵀ with a weight of this shape in 4-bit codes, as of ``DequantizeBnb4``."""
    weight = own.DequantizeBnb4(packed, absmax, shape=shape, block_size=block_size, quant_type=quant_type)
    return op.MatMul(x, op.Transpose(op.CastLike(weight, x), perm=[1, 0]))


@function()
def MatMulBnb4Grad(dy, packed, absmax, shape: Sequence[int] = (), block_size: int = 64, quant_type: int = 1):
    """Gradient of MatMulBnb4: dy · W."""
    weight = own.DequantizeBnb4(packed, absmax, shape=shape, block_size=block_size, quant_type=quant_type)
    return op.MatMul(dy, op.CastLike(weight, dy))


@function()
def MatMulInt8Weight(x, weight, scale):
    """x · Wᵀ, W the integers of weight (N, K) times a scale for each of its rows."""
    return op.MatMul(x, op.Transpose(op.CastLike(weight, x), perm=[1, 0])) * op.CastLike(scale, x)


@function()
def MatMulInt8WeightGrad(dy, weight, scale):
    """Gradient of MatMulInt8Weight: dy · W."""
    return op.MatMul(dy * op.CastLike(scale, dy), op.CastLike(weight, dy))
