"""Gradients of arithmetic, selection and casts."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


@gradient("Add", "Sum")
def add(ctx: Context, dy: Value, *operands: Value) -> Any:
    """Every operand receives dy."""
    return (dy,) * len(operands)


@gradient("Mean")
def mean(ctx: Context, dy: Value, *operands: Value) -> Any:
    """Every operand receives dy over their number."""
    return (dy / float(len(operands)),) * len(operands)


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
    """dx = dy · e · x^(e-1), 0 where e is 0; de = dy · y · log x, 0 where x is 0 and e is not negative (as torch)."""
    op = ctx.op
    e = shapes.constant_of(exponent)
    if e is not None and e.size == 1:
        return _constant_power(ctx, dy, x, float(e.reshape(-1)[0]))
    power = op.cast(exponent, shapes.dtype_of(x))
    one, zero = op.like(1.0, x), op.like(0.0, x)
    dx = op.Where(op.Equal(power, zero), zero, dy * power * op.Pow(x, power - one))
    flat = op.And(op.Equal(x, zero), op.GreaterOrEqual(power, zero))
    de = op.Where(flat, zero, dy * ctx.y * op.Log(op.Where(flat, one, x)))
    return dx, op.cast(de, shapes.dtype_of(exponent))


def _constant_power(ctx: Context, dy: Value, x: Value, e: float) -> Value:
    """dy · e · x^(e-1) with the cheap powers written out; an exponent 1 or 0 is seen before 0^(e-1) is."""
    if e in (0.0, 1.0):
        return dy * e
    if e == 2.0:
        return dy * x * 2.0
    return dy * ctx.op.like(e, x) * ctx.op.Pow(x, ctx.op.like(e - 1.0, x))


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


@gradient("Tan")
def tan(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · (1 + y²)."""
    return dy * (ctx.y * ctx.y + 1.0)


@gradient("Asin")
def asin(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / √(1 - x²)."""
    return dy / ctx.op.Sqrt(ctx.op.like(1.0, x) - x * x)


@gradient("Acos")
def acos(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = -dy / √(1 - x²)."""
    return ctx.op.Neg(asin(ctx, dy, x))


@gradient("Atan")
def atan(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / (1 + x²)."""
    return dy / (x * x + 1.0)


@gradient("Sinh")
def sinh(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · cosh x."""
    return dy * ctx.op.Cosh(x)


@gradient("Cosh")
def cosh(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · sinh x."""
    return dy * ctx.op.Sinh(x)


@gradient("Asinh")
def asinh(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / √(x² + 1)."""
    return dy / ctx.op.Sqrt(x * x + 1.0)


@gradient("Acosh")
def acosh(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / √(x² - 1)."""
    return dy / ctx.op.Sqrt(x * x - ctx.op.like(1.0, x))


@gradient("Atanh")
def atanh(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / (1 - x²)."""
    return dy / (ctx.op.like(1.0, x) - x * x)


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
    """dy shared equally among the operands that attain the extreme; of two, whole to both where one is no number."""
    op = ctx.op
    if len(operands) == 1:
        return dy
    if len(operands) == 2:
        a, b = operands
        zero, share = op.like(0.0, dy), op.Where(op.Equal(a, b), dy * 0.5, dy)
        less, more = op.Where(op.Less(a, b), zero, share), op.Where(op.Greater(a, b), zero, share)
        return (less, more) if ctx.node.op_type == "Max" else (more, less)
    hits = [op.cast(op.Equal(x, ctx.y), shapes.dtype_of(dy)) for x in operands]
    share = dy / op.Sum(*hits)
    return tuple(share * hit for hit in hits)


@gradient("Clip")
def clip(ctx: Context, dy: Value, x: Value, low: Value | None = None, high: Value | None = None) -> Any:
    """dx = dy within the bounds, bounds included; a bound that is exceeded gets dy, the upper one where they cross.

    What is no number is not within them.
    """
    op, zero = ctx.op, ctx.op.like(0.0, dy)
    if low is None and high is None:
        return dy
    inside = [op.GreaterOrEqual(x, low)] if low is not None else []
    inside += [op.LessOrEqual(x, high)] if high is not None else []
    dx = op.Where(inside[0] if len(inside) == 1 else op.And(*inside), dy, zero)
    above = None if high is None else op.Greater(x, high)
    if low is None:
        return dx, None, op.Where(above, dy, zero)
    below = op.Less(x, low)
    if above is None:
        return dx, op.Where(below, dy, zero)
    crossed = op.Greater(low, high)
    at_low = op.And(below, op.Not(crossed))
    return dx, op.Where(at_low, dy, zero), op.Where(op.Or(above, crossed), dy, zero)


@gradient("Mod")
def mod(ctx: Context, dy: Value, a: Value, b: Value, *, fmod: int = 0) -> Any:
    """da = dy; db = -dy · trunc or floor of a/b, as fmod says; of a divisor that a/b is infinite for, -dy · a/b."""
    op, ratio = ctx.op, a / b
    is_over = op.And(op.IsInf(ratio), op.Not(op.IsInf(a)))
    whole = op.Round((a - ctx.y) / b)
    return dy, op.Neg(dy * op.Where(op.Or(op.Equal(b, op.like(0.0, b)), is_over), ratio, whole))


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


@gradient("DropoutGrad", domain=DOMAIN)
def dropout_grad(ctx: Context, dy: Value, x: Value, mask: Value, ratio: Value) -> Any:
    """Linear in x, as Dropout is: dx = dy · mask / (1 - ratio)."""
    return ctx.op.DropoutGrad(dy, mask, ratio), None, None
