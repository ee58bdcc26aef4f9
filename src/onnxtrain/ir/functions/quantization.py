"""Quantization in floating point: values rounded to what integers of a scale can say."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op


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
