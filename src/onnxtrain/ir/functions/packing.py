"""Rows without padding: taken out of a padded tensor, put back into one.

Rows are numbered as in the flattened first axes of the padded tensor: row ``b * s + p`` is position p of sequence b.
Row numbers are ascending and without duplicates.
"""

from __future__ import annotations

from onnxtrain.ir.functions import function, op, own


@function()
def ShrunkenGather(x, indices):
    """Rows of x (N, ...) at the indices (T): (T, ...)."""
    return op.Gather(x, indices, axis=0)


@function()
def ShrunkenGatherGrad(dy, indices, shape):
    """Gradient of ShrunkenGather: zeros of that shape with the rows of dy (T, ...) at the indices (T)."""
    zeros = op.Expand(op.CastLike(op.Constant(value_int=0), dy), shape)
    ones = op.Expand(op.Constant(value_ints=[1]), op.Shape(op.Shape(dy, start=1)))
    places = op.Reshape(indices, op.Concat(op.Shape(indices), ones, axis=0), allowzero=1)
    return op.ScatterElements(zeros, op.Expand(places, op.Shape(dy)), dy, axis=0)


@function()
def FlattenAndUnpad(x, rows):
    """The rows (T) of x (B, S, ...), flattened to (B * S, ...): (T, ...); and the sizes (B, S)."""
    sizes = op.Shape(x, start=0, end=2)
    flat = op.Concat(op.ReduceProd(sizes, keepdims=1), op.Shape(x, start=2), axis=0)
    return own.ShrunkenGather(op.Reshape(x, flat, allowzero=1), rows), sizes


@function()
def PadAndUnflatten(x, rows, shape):
    """x (T, ...) at the rows (T) of zeros with the first two sizes ``shape`` = (B, S): (B, S, ...)."""
    rest = op.Shape(x, start=1)
    flat = own.ShrunkenGatherGrad(x, rows, op.Concat(op.ReduceProd(shape, keepdims=1), rest, axis=0))
    return op.Reshape(flat, op.Concat(shape, rest, axis=0), allowzero=1)


@function()
def PackedDropout(x, ratio):
    """Dropout among packed rows, whose random numbers need not be those of a padded batch: the result and its mask."""
    y, kept = op.Dropout(x, ratio, op.Cast(op.Constant(value_int=1), to=9))
    return y, kept


@function()
def PaddedHeads(x, rows, shape):
    """Packed rows x (T, heads, width) as a padded batch: (B, heads, S, width), zeros where no row is."""
    return op.Transpose(own.PadAndUnflatten(x, rows, shape), perm=[0, 2, 1, 3])


@function()
def PackedHeads(x, rows):
    """The rows (T) of a padded batch x (B, heads, S, width): (T, heads, width)."""
    packed, _ = own.FlattenAndUnpad(op.Transpose(x, perm=[0, 2, 1, 3]), rows)
    return packed


@function()
def PackedScores(q, k, q_rows, k_rows, q_shape, k_shape, mask, scale: float = 1.0, causal: int = 0):
    """Scores (B, heads, Sq, Sk) of packed queries and keys, minus infinity where a query does not see a key."""
    scores = own.AttentionScores(own.PaddedHeads(q, q_rows, q_shape), own.PaddedHeads(k, k_rows, k_shape), scale=scale)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    rows = op.Range(zero, op.Squeeze(op.Shape(scores, start=2, end=3)), one)
    columns = op.Range(zero, op.Squeeze(op.Shape(scores, start=3, end=4)), one)
    late = op.Greater(columns, op.Unsqueeze(rows, op.Constant(value_ints=[1])))
    present = op.Cast(own.PadAndUnflatten(op.Expand(one, op.Shape(k_rows)), k_rows, k_shape), to=9)
    missing = op.Not(op.Unsqueeze(present, op.Constant(value_ints=[1, 2])))
    unseen = op.Or(missing, op.And(late, op.Equal(op.Constant(value_int=causal), one)))
    blocked = op.CastLike(op.Constant(value_float=float("-inf")), scores)
    return op.Where(unseen, blocked, scores + op.CastLike(mask, scores))


@function()
def PackedPlaces(scores, q_rows, k_rows, q_shape, k_shape):
    """For each element of the scores, flattened, whether its row and its column exist."""
    one = op.Constant(value_int=1)
    rows = op.Cast(own.PadAndUnflatten(op.Expand(one, op.Shape(q_rows)), q_rows, q_shape), to=9)
    columns = op.Cast(own.PadAndUnflatten(op.Expand(one, op.Shape(k_rows)), k_rows, k_shape), to=9)
    both = op.And(
        op.Unsqueeze(rows, op.Constant(value_ints=[1, 3])), op.Unsqueeze(columns, op.Constant(value_ints=[1, 2]))
    )
    return op.Reshape(op.Expand(both, op.Shape(scores)), op.Constant(value_ints=[-1]))


@function(optional=("mask",))
def PackedAttention(
    q, k, v, q_rows, k_rows, q_shape, k_shape, mask, scale: float = 1.0, ratio: float = 0.0, causal: int = 0
):
    """Attention among rows without padding, as the dense one in which keys without a row do not exist.

    q (Tq, heads, d), k (Tk, heads, d) and v (Tk, heads, e) are the rows ``q_rows`` and ``k_rows`` of batches of the
    shapes ``q_shape`` = (B, Sq) and ``k_shape`` = (B, Sk). ``mask`` is added to the scores, to whose dense shape
    (B, heads, Sq, Sk) it broadcasts; where ``causal`` is 1 a query sees no key at a later place of its sequence. A
    query that sees no key gets zeros. ``ratio`` is the chance that dropout takes an attention weight away.

    Returns y (Tq, heads, e); the log of the sum of exponentials of each query (Tq, heads); and what dropout has kept:
    for each sequence in order its block (heads, queries, keys), flattened.
    """
    scores = own.PackedScores(q, k, q_rows, k_rows, q_shape, k_shape, mask, scale=scale, causal=causal)
    weights, log_sum_exp = own.AttentionWeights(scores)
    yes = op.Cast(op.Constant(value_int=1), to=9)
    chance = op.Constant(value_float=ratio)
    _, drawn = op.Dropout(weights, chance, yes)
    factor = op.CastLike(drawn, scores) / op.CastLike(op.Constant(value_float=1.0) - chance, scores)
    y = own.PackedHeads(op.MatMul(weights * factor, own.PaddedHeads(v, k_rows, k_shape)), q_rows)
    sums, _ = own.FlattenAndUnpad(op.Transpose(log_sum_exp, perm=[0, 2, 1]), q_rows)
    places = own.PackedPlaces(scores, q_rows, k_rows, q_shape, k_shape)
    return y, sums, op.Compress(op.Reshape(drawn, op.Constant(value_ints=[-1])), places)


@function(like=(1, 2, 3), optional=("mask", "y", "log_sum_exp", "kept"))
def PackedAttentionGrad(
    dy,
    q,
    k,
    v,
    q_rows,
    k_rows,
    q_shape,
    k_shape,
    mask,
    y,
    log_sum_exp,
    kept,
    scale: float = 1.0,
    ratio: float = 0.0,
    causal: int = 0,
):
    """Gradients of q, k and v of PackedAttention; the mask gets none.

    Where ``ratio`` is 0, y and the log of the sum of exponentials are given; otherwise, what dropout has kept.
    """
    scores = own.PackedScores(q, k, q_rows, k_rows, q_shape, k_shape, mask, scale=scale, causal=causal)
    weights, _ = own.AttentionWeights(scores)
    places = own.PackedPlaces(scores, q_rows, k_rows, q_shape, k_shape)
    numbers = op.Reshape(op.NonZero(places), op.Constant(value_ints=[-1]))
    zero = op.Constant(value_float=0.0)
    chance = op.Constant(value_float=ratio)
    drawn = op.Or(op.Cast(op.Expand(kept, op.Shape(numbers)), to=9), op.Equal(chance, zero))
    nowhere = op.Expand(op.Cast(zero, to=9), op.Shape(places))
    dense = op.Reshape(op.ScatterElements(nowhere, numbers, drawn, axis=0), op.Shape(scores))
    factor = op.CastLike(dense, scores) / op.CastLike(op.Constant(value_float=1.0) - chance, scores)
    g = own.PaddedHeads(dy, q_rows, q_shape)
    dv = op.MatMul(op.Transpose(weights * factor, perm=[0, 1, 3, 2]), g)
    dweights = op.MatMul(g, op.Transpose(own.PaddedHeads(v, k_rows, k_shape), perm=[0, 1, 3, 2])) * factor
    dscores = weights * (dweights - op.ReduceSum(dweights * weights, op.Constant(value_ints=[-1]), keepdims=1))
    dq, dk = own.AttentionInputsGrad(
        dscores, own.PaddedHeads(q, q_rows, q_shape), own.PaddedHeads(k, k_rows, k_shape), scale=scale
    )
    return own.PackedHeads(dq, q_rows), own.PackedHeads(dk, k_rows), own.PackedHeads(dv, k_rows)
