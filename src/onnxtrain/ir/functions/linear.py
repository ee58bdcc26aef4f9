"""Our operators of linear algebra, and of products."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op


@function(like=(0,))
def Cofactors(x):
    """The cofactors of matrices (..., n, n), n > 1: the determinants without each row and column, by their signs.

    Row i is left out by taking the rows 0 … n-2, from i on one further: k + (k >= i).
    """
    zero, one, minus_one = op.Constant(value_int=0), op.Constant(value_int=1), op.Constant(value_ints=[-1])
    n = op.Squeeze(op.Shape(x, start=-1))
    numbers = op.Range(zero, n, one)
    column = op.Unsqueeze(numbers, op.Constant(value_ints=[1]))
    kept = op.Range(zero, n - one, one)
    without = kept + op.Cast(op.GreaterOrEqual(kept, column), to=7)
    size = op.Shape(x, start=-1)
    matrices = op.Reshape(x, op.Concat(minus_one, size, size, axis=0))
    parts = op.Gather(op.Gather(matrices, without, axis=1), without, axis=3)
    minors = op.Det(op.Transpose(parts, perm=[0, 1, 3, 2, 4]))
    odd = op.Mod(numbers + column, op.Constant(value_int=2))
    signs = op.CastLike(one - odd - odd, x)
    return op.Reshape(minors * signs, op.Shape(x))


@function(like=(0,))
def ProductOfOthers(x, axes):
    """For each element the product of the other ones along axes, also where some are 0."""
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    is_zero = op.Equal(x, zero)
    zeros = op.Cast(is_zero, to=7)
    others = op.ReduceSum(zeros, axes, keepdims=1) - zeros
    factor = op.Where(is_zero, one, x)
    rest = op.ReduceProd(factor, axes, keepdims=1) / factor
    return op.Where(op.Greater(others, op.Constant(value_int=0)), zero, rest)
