"""Gradients of quantization: rounding is passed straight through inside of the range."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("FakeQuant", domain=DOMAIN)
def fake_quant(
    ctx: Context, dy: Value, x: Value, scale: Value, zero_point: Value, *, quant_min: int = -128, quant_max: int = 127
) -> Any:
    """dx = dy where x is inside of the range, 0 elsewhere.

    dscale = dy (y - x) / scale inside, dy y / scale outside: Learned Step Size Quantization, arXiv 1902.08153.
    """
    if any(ctx.wanted[2:]):
        raise ctx.unsupported("the gradient of the zero point of FakeQuant")
    dx = ctx.op.FakeQuantGrad(dy, x, scale, zero_point, quant_min=quant_min, quant_max=quant_max)
    return dx, (dy * ctx.y - dx * x) / scale, None


@gradient("DequantizeLinear")
def dequantize(
    ctx: Context,
    dy: Value,
    x: Value,
    scale: Value,
    zero_point: Value | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    **_: Any,
) -> Any:
    """dscale = Σ dy (x - zero_point), over all axes but that of the scale; the integers get none."""
    op, rank = ctx.op, shapes.rank(x)
    if block_size:
        raise ctx.unsupported("the gradient of DequantizeLinear with block_size")
    level = op.cast(x, shapes.dtype_of(dy))
    per_axis = shapes.rank(scale) == 1 and rank > 0
    if zero_point is not None:
        zero = op.cast(zero_point, shapes.dtype_of(dy))
        if per_axis:
            zero = op.Reshape(zero, op.ints(*(-1 if i == axis % rank else 1 for i in range(rank))))
        level = level - zero
    product = dy * level
    if not per_axis:
        return None, product, None
    return None, op.ReduceSum(product, op.ints(*(i for i in range(rank) if i != axis % rank)), keepdims=0), None


@gradient("MatMulBnb4", domain=DOMAIN)
def matmul_4bit(ctx: Context, dy: Value, x: Value, packed: Value, absmax: Value, **form: Any) -> Any:
    """dx = dy · W; the weight is frozen."""
    if ctx.wanted[2]:
        raise ctx.unsupported("the gradient of the scales of MatMulBnb4")
    return ctx.op.MatMulBnb4Grad(dy, packed, absmax, **form), None, None


@gradient("MatMulBnb4Grad", domain=DOMAIN)
def matmul_4bit_grad(ctx: Context, dx: Value, dy: Value, packed: Value, absmax: Value, **form: Any) -> Any:
    """ddy = dx · Wᵀ."""
    if ctx.wanted[2]:
        raise ctx.unsupported("the gradient of the scales of MatMulBnb4Grad")
    return ctx.op.MatMulBnb4(dx, packed, absmax, **form), None, None


@gradient("MatMulInt8Weight", domain=DOMAIN)
def matmul_8bit(ctx: Context, dy: Value, x: Value, weight: Value, scale: Value) -> Any:
    """dx = dy · W; the weight is frozen."""
    if ctx.wanted[2]:
        raise ctx.unsupported("the gradient of the scales of MatMulInt8Weight")
    return ctx.op.MatMulInt8WeightGrad(dy, weight, scale), None, None


@gradient("MatMulInt8WeightGrad", domain=DOMAIN)
def matmul_8bit_grad(ctx: Context, dx: Value, dy: Value, weight: Value, scale: Value) -> Any:
    """ddy = dx · Wᵀ."""
    if ctx.wanted[2]:
        raise ctx.unsupported("the gradient of the scales of MatMulInt8WeightGrad")
    return ctx.op.MatMulInt8Weight(dx, weight, scale), None, None
