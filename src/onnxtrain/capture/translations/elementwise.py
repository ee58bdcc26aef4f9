"""Functions whose formula in torch.onnx is less exact than torch's, which stay whole, and one that it does not know."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import alike, like, translation, whole

aten = torch.ops.aten


@translation(round)
def rounded(x, digits=None):
    """The whole number nearest to a number that a tensor holds, of two the even one."""
    if digits is not None:
        raise NotImplementedError("digits")
    return op.Cast(op.Round(x), to=int(ir.DataType.INT64))


@translation(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x, y):
    """Of floating numbers by the exact remainder of truncated division, which has the sign of x."""
    x, y, known = alike(x, y)
    if not known.dtype.is_floating_point():
        return op.Mod(x, y)
    left = op.Mod(x, y, fmod=1)
    return op.Where(_turns(left, y, like(0, known)), op.Add(left, y), left)


@translation(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x, y):
    """Of floating numbers what is left without the exact remainder, as torch has it: 1.0 // 0.1 is 9."""
    x, y, known = alike(x, y)
    if not known.dtype.is_floating_point():
        return NotImplemented
    zero, one = like(0, known), like(1, known)
    left = op.Mod(x, y, fmod=1)
    quotient = op.Div(op.Sub(x, left), y)
    quotient = op.Where(_turns(left, y, zero), op.Sub(quotient, one), quotient)
    whole_part = op.Floor(quotient)
    is_next = op.Greater(op.Sub(quotient, whole_part), like(0.5, known))
    nearest = op.Where(is_next, op.Add(whole_part, one), whole_part)
    exact = op.Div(x, y)
    signed = op.Where(op.Equal(quotient, zero), _truncated(exact, zero), nearest)
    is_over = op.And(op.IsInf(exact), op.Not(op.IsInf(x)))
    return op.Where(op.Or(op.Equal(y, zero), is_over), op.Floor(exact), signed)


@translation(aten.div.Tensor_mode, aten.div.Scalar_mode)
def rounded_quotient(x, y, rounding_mode=None):
    """Rounded down it is a floor division, towards 0 of floating numbers one Div without its fraction."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    x, y, known = alike(x, y)
    if rounding_mode != "trunc" or not known.dtype.is_floating_point():
        return NotImplemented
    return _truncated(op.Div(x, y), like(0, known))


@translation(aten.trunc.default, aten.fix.default)
def trunc(x):
    """Towards 0: a zero keeps its sign, and what is rounded to 0 has that of the number."""
    return _truncated(x, like(0, x)) if x.dtype.is_floating_point() else NotImplemented


@translation(aten.frac.default)
def frac(x):
    """What trunc takes away."""
    return op.Sub(x, _truncated(x, like(0, x)))


@translation(aten.hardswish.default)
def hardswish(x):
    """One HardSwish."""
    return op.HardSwish(x)


@translation(aten.hardsigmoid.default)
def hardsigmoid(x):
    """One HardSigmoid, of torch's slope."""
    return op.HardSigmoid(x, alpha=1 / 6, beta=0.5)


@translation(aten.heaviside.default)
def heaviside(x, values):
    """1 above 0 and the values at 0; what is no number is not above it."""
    return op.Where(op.Equal(x, like(0, x)), values, op.CastLike(op.Greater(x, like(0, x)), x))


def _truncated(x: Any, zero: Any) -> Any:
    return op.Where(op.Less(x, zero), op.Ceil(x), op.Floor(x))


def _turns(left: Any, y: Any, zero: Any) -> Any:
    """Where a remainder is not 0 and has another sign than the divisor."""
    return op.And(op.Not(op.Equal(left, zero)), op.Xor(op.Less(left, zero), op.Less(y, zero)))


@whole(aten.special_log_ndtr.default)
def has_tails(node: torch.fx.Node) -> bool:
    """The formula is the logarithm of a distribution function that has become 0 in its tail."""
    return True


@whole(aten.selu.default, aten.celu.default, aten.hardsigmoid.default)
def has_numbers_in_double(node: torch.fx.Node) -> bool:
    """The numbers of the formula are attributes, and ONNX keeps these in float32."""
    return node.meta["val"].dtype == torch.float64
