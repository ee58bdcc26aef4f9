"""Gradients of arithmetic, selection and casts."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("Add", "Sum")
def add(ctx: Context, dy: Value, *operands: Value) -> Any:
    """Every operand receives dy."""
    return (dy,) * len(operands)


@gradient("Sub")
def sub(ctx: Context, dy: Value, a: Value, b: Value) -> Any:
    """da = dy, db = -dy."""
    return dy, ctx.op.Neg(dy)


@gradient("Mul")
def mul(ctx: Context, dy: Value, a: Value, b: Value) -> Any:
    """da = dy · b, db = dy · a."""
    return dy * b, dy * a


@gradient("Div")
def div(ctx: Context, dy: Value, a: Value, b: Value) -> Any:
    """da = dy / b, db = -dy · a / b² = -da · y."""
    da = dy / b
    return da, ctx.op.Neg(da * ctx.y)


@gradient("Pow")
def pow_(ctx: Context, dy: Value, x: Value, exponent: Value) -> Any:
    """dx = dy · e · x^(e-1); de = dy · y · log x, 0 where x is 0."""
    op = ctx.op
    e = shapes.constant_of(exponent)
    if e is not None and e.size == 1:
        if float(e.reshape(-1)[0]) in (0.0, 1.0):
            return dy * float(e.reshape(-1)[0])
        if float(e.reshape(-1)[0]) == 2.0:
            return dy * x * 2.0
        factor = op.like(float(e.reshape(-1)[0]), x)
        return dy * factor * op.Pow(x, op.like(float(e.reshape(-1)[0]) - 1.0, x))
    power = op.cast(exponent, shapes.dtype_of(x))
    one, zero = op.like(1.0, x), op.like(0.0, x)
    dx = dy * power * op.Pow(x, power - one)
    dx = op.Where(op.Equal(power, zero), zero, dx)
    logarithm = op.Log(op.Where(op.Equal(x, zero), one, x))
    return dx, op.cast(dy * ctx.y * logarithm, shapes.dtype_of(exponent))


@gradient("Neg")
def neg(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = -dy."""
    return ctx.op.Neg(dy)


@gradient("Identity")
def identity(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy."""
    return dy


@gradient("Abs")
def abs_(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · sign(x)."""
    return dy * ctx.op.Sign(x)


@gradient("Sqrt")
def sqrt(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / (2y)."""
    return dy / (ctx.y * 2.0)


@gradient("Reciprocal")
def reciprocal(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = -dy · y²."""
    return ctx.op.Neg(dy * ctx.y * ctx.y)


@gradient("Exp")
def exp(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · y."""
    return dy * ctx.y


@gradient("Log")
def log(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / x."""
    return dy / x


@gradient("Sin")
def sin(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · cos x."""
    return dy * ctx.op.Cos(x)


@gradient("Cos")
def cos(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = -dy · sin x."""
    return ctx.op.Neg(dy * ctx.op.Sin(x))


@gradient("Cast")
def cast(ctx: Context, dy: Value, x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    """dy in x's type."""
    return ctx.op.cast(dy, shapes.dtype_of(x))


@gradient("CastLike")
def cast_like(ctx: Context, dy: Value, x: Value, model: Value, *, saturate: int = 1, round_mode: str = "up") -> Any:
    """dy in x's type."""
    return ctx.op.cast(dy, shapes.dtype_of(x)), None


@gradient("Where")
def where(ctx: Context, dy: Value, condition: Value, a: Value, b: Value) -> Any:
    """dy where the branch was taken, 0 elsewhere."""
    zero = ctx.op.like(0.0, dy)
    return None, ctx.op.Where(condition, dy, zero), ctx.op.Where(condition, zero, dy)


@gradient("Max", "Min")
def extreme(ctx: Context, dy: Value, *operands: Value) -> Any:
    """dy shared equally among the operands that attain the extreme."""
    op = ctx.op
    if len(operands) == 1:
        return dy
    hits = [op.cast(op.Equal(x, ctx.y), shapes.dtype_of(dy)) for x in operands]
    share = dy / (op.Sum(*hits) if len(hits) > 2 else hits[0] + hits[1])
    return tuple(share * hit for hit in hits)


@gradient("Clip")
def clip(ctx: Context, dy: Value, x: Value, low: Value | None = None, high: Value | None = None) -> Any:
    """dy within the bounds, bounds included; 0 outside."""
    op = ctx.op
    inside = None
    if low is not None:
        inside = op.GreaterOrEqual(x, low)
    if high is not None:
        below = op.LessOrEqual(x, high)
        inside = below if inside is None else op.And(inside, below)
    return dy if inside is None else op.Where(inside, dy, op.like(0.0, dy))


@gradient("Mod")
def mod(ctx: Context, dy: Value, a: Value, b: Value, *, fmod: int = 0) -> Any:
    """da = dy; db = -dy · trunc or floor of a/b, as fmod says."""
    quotient = (a - ctx.y) / b
    return dy, ctx.op.Neg(dy * ctx.op.Round(quotient))


@gradient("Dropout")
def dropout(
    ctx: Context, dy: Value, x: Value, ratio: Value | None = None, training: Value | None = None, *, seed: int = 0
) -> Any:
    """dx = dy · mask / (1 - ratio); dy itself outside training, which may be known only at run time."""
    flag = shapes.constant_of(training)
    if training is None or (flag is not None and not bool(flag)):
        return dy
    used = ratio if ratio is not None else ctx.op.like(0.5, x)
    if flag is None:
        used = ctx.op.Where(training, used, ctx.op.like(0.0, used))
    return ctx.op.DropoutGrad(dy, ctx.output(1), used)
