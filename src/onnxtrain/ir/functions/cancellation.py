"""Our operators for what loses the digits of small results when written out: log(1 + x), exp(x) - 1, 1 - erf(x)."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op


@function(like=(0,))
def Log1p(x):
    """``log(1 + x)``: what rounding 1 + x adds is taken away again (W. Kahan, in the manual of the HP-15C, 1982)."""
    one = op.CastLike(op.Constant(value_float=1.0), x)
    larger = x + one
    rounded = larger - one
    none = op.Equal(rounded, op.CastLike(op.Constant(value_float=0.0), x))
    plain = op.Or(none, op.IsInf(op.Cast(larger, to=1)))
    return op.Where(none, x, op.Log(larger) * op.Where(plain, one, x / op.Where(plain, one, rounded)))


@function(like=(0,))
def Expm1(x):
    """``exp(x) - 1``: 2 t / (1 - t) with t = tanh(x / 2) where x is small."""
    one = op.CastLike(op.Constant(value_float=1.0), x)
    half = op.CastLike(op.Constant(value_float=0.5), x)
    t = op.Tanh(op.Clip(x, op.Neg(half), half) * half)
    return op.Where(op.LessOrEqual(op.Abs(x), half), (t + t) / (one - t), op.Exp(x) - one)


@function(like=(0,))
def Erfc(x):
    """``1 - erf(x)``: above 1 by an approximation with a relative error below 1.2e-7 (Numerical Recipes, erfcc)."""
    one = op.CastLike(op.Constant(value_float=1.0), x)
    two = op.CastLike(op.Constant(value_float=2.0), x)
    above = op.Max(x, one)
    t = two / (two + above)
    sum9 = t * op.CastLike(op.Constant(value_float=0.17087277), x)
    sum8 = t * (op.CastLike(op.Constant(value_float=-0.82215223), x) + sum9)
    sum7 = t * (op.CastLike(op.Constant(value_float=1.48851587), x) + sum8)
    sum6 = t * (op.CastLike(op.Constant(value_float=-1.13520398), x) + sum7)
    sum5 = t * (op.CastLike(op.Constant(value_float=0.27886807), x) + sum6)
    sum4 = t * (op.CastLike(op.Constant(value_float=-0.18628806), x) + sum5)
    sum3 = t * (op.CastLike(op.Constant(value_float=0.09678418), x) + sum4)
    sum2 = t * (op.CastLike(op.Constant(value_float=0.37409196), x) + sum3)
    sum1 = t * (op.CastLike(op.Constant(value_float=1.00002368), x) + sum2)
    tail = t * op.Exp(sum1 - above * above - op.CastLike(op.Constant(value_float=1.26551223), x))
    return op.Where(op.Greater(x, one), tail, one - op.Erf(x))
