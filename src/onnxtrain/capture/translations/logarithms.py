"""Logarithms and exponentials: exact where numbers are small, finite where they are large, and torch's at the ends."""

from __future__ import annotations

import math
from typing import Any

import torch

from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import alike, like, translation, whole

aten = torch.ops.aten


@translation(aten.log2.default)
def log2(x):
    """By the logarithm of 2 as exact as the type."""
    return op.Div(op.Log(x), like(math.log(2), x))


@translation(aten.log_sigmoid.default)
def log_sigmoid(x):
    """Finite where the sigmoid is 0."""
    return op.Sub(like(0.0, x), op.Softplus(op.Neg(x)))  # 0, not -0, where the sigmoid is 1


@translation(aten.log_sigmoid_forward.default)
def log_sigmoid_and_part(x):
    """The same where it is mapped over, and what torch's kernel keeps of it for its own gradient."""
    return log_sigmoid(x), op.Exp(op.Neg(op.Abs(x)))


@translation(aten.logaddexp.default)
def log_of_sum(x, y):
    """The larger one and what the smaller one adds, log(1 + exp(-|x - y|)), where exp of either is infinite too."""
    larger, apart = _larger(x, y)
    return op.Add(larger, op.Softplus(apart))


@translation(aten.logaddexp2.default)
def binary_log_of_sum(x, y):
    """The same by powers of 2."""
    larger, apart = _larger(x, y)
    more = op.Softplus(op.Mul(apart, like(math.log(2), x)))
    return op.Add(larger, op.Div(more, like(math.log(2), x)))


def _larger(x: Any, y: Any) -> tuple[Any, Any]:
    """The larger of two, and the smaller less it; of two that are infinite alike that is 0."""
    is_less = op.Less(x, y)
    less, more = op.Where(is_less, x, y), op.Where(is_less, y, x)
    alike, zero = op.And(op.Equal(x, y), op.IsInf(x)), like(0, x)
    return more, op.Sub(op.Where(alike, zero, less), op.Where(alike, zero, more))


@whole(aten.special_entr.default)
def is_steep_at_zero(node: torch.fx.Node) -> bool:
    """The formula's gradient is no number there, where torch's is infinite."""
    return True


@whole(aten.logcumsumexp.default, aten.special_erfcx.default)
def has_a_formula_that_overflows(node: torch.fx.Node) -> bool:
    """Sums of exponentials, and exp(x²) erfc(x): kernels have what is finite of them."""
    return True


@translation(aten.log10.default)
def log10(x):
    """By the logarithm of 10."""
    return op.Div(op.Log(x), like(math.log(10), x))


@translation(aten.logit.default)
def logit(x, eps=None):
    """Outside of probabilities no number, nor its gradient; the lower bound holds where the two cross."""
    one = like(1, x)
    if eps is not None:
        low, high = like(eps, x), like(1 - eps, x)
        x = op.Where(op.Less(x, low), low, op.Where(op.Greater(x, high), high, x))
    outside = op.Or(op.Less(x, like(0, x)), op.Greater(x, one))
    x = op.Add(x, op.Where(outside, like(math.nan, x), like(0, x)))
    return op.Sub(op.Log(x), op.Log(op.Sub(one, x)))


@translation(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
@translation(aten.special_xlogy.default, aten.special_xlogy.other_scalar, aten.special_xlogy.self_scalar)
def times_logarithm(x, y):
    """0 where x is, also times an infinite logarithm."""
    x, y, known = alike(x, y)
    return _times(x, y, op.Log(y), op.LessOrEqual(y, like(0, known)), known)


@translation(aten.special_xlog1py.default, aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar)
def times_logarithm_of_more(x, y):
    """The same with log(1 + y)."""
    x, y, known = alike(x, y)
    return _times(x, y, record_node("Log1p", [y]), op.LessOrEqual(y, like(-1, known)), known)


def _times(x: Any, y: Any, logarithm: Any, is_low: Any, known: Any) -> Any:
    is_zero = op.Equal(x, like(0, known))
    product = op.Mul(x, op.Where(op.And(is_zero, op.Or(is_low, op.IsInf(y))), like(0, known), logarithm))
    nothing = op.Where(is_zero, like(0.0, known), like(-0.0, known))  # no zero is -0 because a logarithm is negative
    return op.Add(product, nothing)


@translation(aten.log1p.default)
def log1p(x):
    """One Log1p node: exact where x is small."""
    return record_node("Log1p", [x])


@translation(aten.expm1.default, aten.special_expm1.default)
def expm1(x):
    """One Expm1 node."""
    return record_node("Expm1", [x])


@translation(aten.erfc.default, aten.special_erfc.default)
def erfc(x):
    """One Erfc node."""
    return record_node("Erfc", [x])
