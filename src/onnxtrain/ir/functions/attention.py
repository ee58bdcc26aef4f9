"""Scaled dot-product attention as one operator in each direction, plain, causal or with an additive mask.

Each returns the output and the log of the sum of exponentials of each row, from which the gradient computes the
attention weights again instead of keeping them (Dao et al., FlashAttention, 2022). A row whose keys are all masked by
minus infinity gives zero, as torch's kernels do.

Shapes: q (batch, heads, rows, width), k and v (batch, heads, columns, width); mask broadcasts to (batch, heads,
rows, columns) and is added to the scores.
"""

from __future__ import annotations

from onnxtrain.ir.functions import function, op, own


@function()
def AttentionScores(q, k, scale: float = 1.0):
    """``scale * q @ k^T``."""
    factor = op.CastLike(op.Constant(value_float=scale), q)
    return op.MatMul(q * factor, op.Transpose(k, perm=[0, 1, 3, 2]))


@function()
def CausalMask(scores):
    """0 where the column is not after the row, minus infinity elsewhere: (rows, columns)."""
    square = op.Shape(scores, start=2, end=4)
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), scores), square)
    seen = op.Trilu(op.Expand(op.Constant(value_int=1), square), upper=0)
    blocked = op.CastLike(op.Constant(value_float=float("-inf")), scores)
    return op.Where(op.Cast(seen, to=9), zeros, blocked)


@function()
def AttentionWeights(scores):
    """``softmax(scores)``, 0 in a row of minus infinity; and the log of the sum of exponentials of each row."""
    last = op.Constant(value_ints=[-1])
    zero = op.CastLike(op.Constant(value_float=0.0), scores)
    top = op.ReduceMax(scores, last, keepdims=1)
    peak = op.Where(op.IsInf(top), zero, top)
    exponentials = op.Exp(scores - peak)
    total = op.ReduceSum(exponentials, last, keepdims=1)
    positive = op.Where(op.Equal(total, zero), op.CastLike(op.Constant(value_float=1.0), scores), total)
    return exponentials / positive, op.Squeeze(peak + op.Log(positive), last)


@function()
def AttendedValues(scores, v):
    """``softmax(scores) @ v`` and the log of the sum of exponentials of each row."""
    weights, log_sum_exp = own.AttentionWeights(scores)
    return op.MatMul(weights, v), log_sum_exp


@function()
def AttentionScoresGrad(dy, scores, v, y, log_sum_exp):
    """Gradient of the scores and of v, the weights computed again from the scores."""
    last = op.Constant(value_ints=[-1])
    weights = op.Exp(scores - op.Unsqueeze(log_sum_exp, last))
    dv = op.MatMul(op.Transpose(weights, perm=[0, 1, 3, 2]), dy)
    dweights = op.MatMul(dy, op.Transpose(v, perm=[0, 1, 3, 2]))
    return weights * (dweights - op.ReduceSum(dy * y, last, keepdims=1)), dv


@function()
def AttentionInputsGrad(dscores, q, k, scale: float = 1.0):
    """Gradients of q and k from that of the scores."""
    scaled = dscores * op.CastLike(op.Constant(value_float=scale), q)
    return op.MatMul(scaled, k), op.MatMul(op.Transpose(scaled, perm=[0, 1, 3, 2]), q)


@function()
def ScaledDotProductAttention(q, k, v, scale: float = 1.0):
    """softmax(scale * q @ k^T) @ v."""
    y, log_sum_exp = own.AttendedValues(own.AttentionScores(q, k, scale=scale), v)
    return y, log_sum_exp


@function(like=(1, 2, 3))
def ScaledDotProductAttentionGrad(dy, q, k, v, y, log_sum_exp, scale: float = 1.0):
    """Gradients of q, k and v."""
    dscores, dv = own.AttentionScoresGrad(dy, own.AttentionScores(q, k, scale=scale), v, y, log_sum_exp)
    dq, dk = own.AttentionInputsGrad(dscores, q, k, scale=scale)
    return dq, dk, dv


@function()
def CausalScaledDotProductAttention(q, k, v, scale: float = 1.0):
    """Attention in which a row sees no column after itself."""
    scores = own.AttentionScores(q, k, scale=scale)
    y, log_sum_exp = own.AttendedValues(scores + own.CausalMask(scores), v)
    return y, log_sum_exp


@function(like=(1, 2, 3))
def CausalScaledDotProductAttentionGrad(dy, q, k, v, y, log_sum_exp, scale: float = 1.0):
    """Gradients of q, k and v."""
    scores = own.AttentionScores(q, k, scale=scale)
    dscores, dv = own.AttentionScoresGrad(dy, scores + own.CausalMask(scores), v, y, log_sum_exp)
    dq, dk = own.AttentionInputsGrad(dscores, q, k, scale=scale)
    return dq, dk, dv


@function()
def MaskedScaledDotProductAttention(q, k, v, mask, scale: float = 1.0):
    """Attention with a mask added to the scores."""
    y, log_sum_exp = own.AttendedValues(own.AttentionScores(q, k, scale=scale) + mask, v)
    return y, log_sum_exp


@function(like=(1, 2, 3))
def MaskedScaledDotProductAttentionGrad(dy, q, k, v, mask, y, log_sum_exp, scale: float = 1.0):
    """Gradients of q, k and v; the mask gets none."""
    scores = own.AttentionScores(q, k, scale=scale) + mask
    dscores, dv = own.AttentionScoresGrad(dy, scores, v, y, log_sum_exp)
    dq, dk = own.AttentionInputsGrad(dscores, q, k, scale=scale)
    return dq, dk, dv
