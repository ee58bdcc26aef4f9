"""Gradients of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient

Value = ir.Value


@gradient("Relu")
def relu(ctx: Context, dy: Value, x: Value) -> Any:
    """dy where y > 0: needs the output, not the input."""
    return ctx.op.ReluGrad(dy, ctx.y)


@gradient("LeakyRelu")
def leaky_relu(ctx: Context, dy: Value, x: Value, *, alpha: float = 0.01) -> Any:
    """dy where x > 0, alpha · dy elsewhere."""
    return ctx.op.Where(ctx.op.Greater(x, ctx.op.like(0.0, x)), dy, dy * alpha)


@gradient("Elu")
def elu(ctx: Context, dy: Value, x: Value, *, alpha: float = 1.0) -> Any:
    """dy where x > 0, dy · alpha · exp(x) elsewhere."""
    return _beyond_zero(ctx, x, dy, lambda low: dy * alpha * ctx.op.Exp(low))


@gradient("Celu")
def celu(ctx: Context, dy: Value, x: Value, *, alpha: float = 1.0) -> Any:
    """dy where x > 0, dy · exp(x / alpha) elsewhere."""
    return _beyond_zero(ctx, x, dy, lambda low: dy * ctx.op.Exp(low / alpha))


@gradient("Selu")
def selu(
    ctx: Context,
    dy: Value,
    x: Value,
    *,
    alpha: float = 1.67326319217681884765625,
    gamma: float = 1.05070102214813232421875,
) -> Any:
    """gamma · dy where x > 0, gamma · dy · alpha · exp(x) elsewhere."""
    return _beyond_zero(ctx, x, dy * gamma, lambda low: dy * (alpha * gamma) * ctx.op.Exp(low))


def _beyond_zero(ctx: Context, x: Value, above: Value, below: Callable[[Value], Value]) -> Value:
    """One gradient up to 0, the other above it and of what is no number.

    Args:
        ctx: of the rule.
        x: the operand.
        above: the gradient above 0.
        below: the gradient up to 0, of the operand as far as it is that low: what would overflow has no gradient.
    """
    op, zero = ctx.op, ctx.op.like(0.0, x)
    low = op.Where(op.Less(x, zero), x, zero)  # of 0 the second derivative is torch's, none
    return op.Where(op.LessOrEqual(x, zero), below(low), above)


@gradient("ThresholdedRelu")
def thresholded_relu(ctx: Context, dy: Value, x: Value, *, alpha: float = 1.0) -> Any:
    """dy where x > alpha."""
    return ctx.op.Where(ctx.op.Greater(x, ctx.op.like(alpha, x)), dy, ctx.op.like(0.0, dy))


@gradient("Shrink")
def shrink(ctx: Context, dy: Value, x: Value, *, bias: float = 0.0, lambd: float = 0.5) -> Any:
    """dy outside of ±lambd, bounds excluded."""
    op = ctx.op
    within = op.And(op.GreaterOrEqual(x, op.like(-lambd, x)), op.LessOrEqual(x, op.like(lambd, x)))
    return op.Where(within, op.like(0.0, dy), dy)


@gradient("Mish")
def mish(ctx: Context, dy: Value, x: Value) -> Any:
    """With t = tanh(softplus(x)): dx = dy · (t + x · sigmoid(x) · (1 - t²))."""
    op = ctx.op
    t = op.Tanh(op.Softplus(x))
    return dy * (t + x * op.Sigmoid(x) * (op.like(1.0, x) - t * t))


@gradient("Swish")
def swish(ctx: Context, dy: Value, x: Value, *, alpha: float = 1.0) -> Any:
    """With s = sigmoid(alpha · x): dx = dy · (s + alpha · x · s · (1 - s))."""
    if alpha == 1.0:
        return ctx.op.SiluGrad(dy, x)
    scaled = x * alpha
    s = ctx.op.Sigmoid(scaled)
    return dy * (s + scaled * s * (ctx.op.like(1.0, x) - s))


@gradient("Tanh")
def tanh(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · (1 - y²)."""
    return ctx.op.TanhGrad(dy, ctx.y)


@gradient("Sigmoid")
def sigmoid(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · y · (1 - y)."""
    return ctx.op.SigmoidGrad(dy, ctx.y)


@gradient("Softplus")
def softplus(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · sigmoid(x)."""
    return dy * ctx.op.Sigmoid(x)


@gradient("Softsign")
def softsign(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / (1 + |x|)²."""
    root = ctx.op.Abs(x) + 1.0
    return dy / (root * root)


@gradient("HardSigmoid")
def hard_sigmoid(ctx: Context, dy: Value, x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    """alpha · dy where 0 < alpha · x + beta < 1, the ends excluded (as in torch's hardsigmoid)."""
    op, zero = ctx.op, ctx.op.like(0.0, dy)
    if alpha == 0.0:
        return dy * 0.0
    low, high = sorted((-beta / alpha, (1.0 - beta) / alpha))
    inside = op.And(op.Greater(x, op.like(low, x)), op.Less(x, op.like(high, x)))
    return op.Where(inside, dy * alpha, zero)


@gradient("HardSwish")
def hard_swish(ctx: Context, dy: Value, x: Value) -> Any:
    """dy · (x/3 + 1/2) for -3 < x < 3, dy above, 0 below."""
    op = ctx.op
    three = op.like(3.0, x)
    middle = op.Where(op.Less(x, three), dy * (x / three + 0.5), dy)
    return op.Where(op.Greater(x, op.Neg(three)), middle, op.like(0.0, dy))


@gradient("Erf")
def erf(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · 2/√π · exp(-x²)."""
    return dy * ctx.op.Exp(ctx.op.Neg(x * x)) * 1.1283791670955126


@gradient("Erfc", domain=DOMAIN)
def erfc(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = -dy · 2/√π · exp(-x²)."""
    return ctx.op.Neg(erf(ctx, dy, x))


@gradient("Log1p", domain=DOMAIN)
def log1p(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy / (1 + x)."""
    return dy / (x + 1.0)


@gradient("Expm1", domain=DOMAIN)
def expm1(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · (y + 1)."""
    return dy * (ctx.y + 1.0)


@gradient("Gelu")
def gelu(ctx: Context, dy: Value, x: Value, *, approximate: str = "none") -> Any:
    """One node: GeluGrad, or TanhGeluGrad for the approximation."""
    return ctx.op.TanhGeluGrad(dy, x) if approximate == "tanh" else ctx.op.GeluGrad(dy, x)


@gradient("Silu", domain=DOMAIN)
def silu(ctx: Context, dy: Value, x: Value) -> Any:
    """One node: SiluGrad."""
    return ctx.op.SiluGrad(dy, x)


@gradient("Softmax")
def softmax(ctx: Context, dy: Value, x: Value, *, axis: int = -1) -> Any:
    """(dy - Σ dy·y) · y: needs the output, not the input."""
    return ctx.op.SoftmaxGrad(dy, _numbers_of(ctx.y), axis=axis)


def _numbers_of(y: Value) -> Value:
    """What exporters put in the place of weights that are no numbers, as those of a query that sees no key."""
    for test in (node for node, _ in y.uses() if node.op_type == "IsNaN"):
        for chosen, index in test.outputs[0].uses():
            if chosen.op_type == "Where" and index == 0 and chosen.inputs[2] is y:
                return chosen.outputs[0]
    return y


@gradient("LogSoftmax")
def log_softmax(ctx: Context, dy: Value, x: Value, *, axis: int = -1) -> Any:
    """dy - exp(y) · Σ dy: needs the output, not the input."""
    return ctx.op.LogSoftmaxGrad(dy, ctx.y, axis=axis)


@gradient("PRelu")
def prelu(ctx: Context, dy: Value, x: Value, slope: Value) -> Any:
    """dx = dy or slope · dy by the sign of x; dslope = dy · x where x is negative."""
    op = ctx.op
    zero = op.like(0.0, x)
    positive = op.Greater(x, zero)
    return op.Where(positive, dy, dy * slope), op.Where(positive, op.like(0.0, dy), dy * x)


@gradient("ScaledDotProductAttention", "CausalScaledDotProductAttention", domain=DOMAIN)
def attention(ctx: Context, dy: Value, q: Value, k: Value, v: Value, *, scale: float = 1.0) -> Any:
    """One node that computes the weights again from the log of the sum of exponentials."""
    ctx.first_output_only()
    emit = getattr(ctx.op, f"{ctx.node.op_type}Grad")
    return emit(dy, q, k, v, ctx.y, ctx.output(1), scale=scale, outputs=3)


@gradient("MaskedScaledDotProductAttention", domain=DOMAIN)
def masked_attention(ctx: Context, dy: Value, q: Value, k: Value, v: Value, mask: Value, *, scale: float = 1.0) -> Any:
    """As above; the mask gets no gradient: capture keeps learned masks out of this operator."""
    ctx.first_output_only()
    emit = ctx.op.MaskedScaledDotProductAttentionGrad
    return emit(dy, q, k, v, mask, ctx.y, ctx.output(1), scale=scale, outputs=3)
