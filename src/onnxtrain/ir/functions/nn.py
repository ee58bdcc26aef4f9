"""Our operators of neural network layers: fused forms and their gradients."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op, own


@function(like=(0,))
def Detach(x):
    """The identity through which no gradient flows (torch's ``detach``)."""
    return op.Identity(x)


@function()
def Linear(x, weight, bias):
    """``x @ weight.T + bias``: x (..., in), weight (out, in), bias (out)."""
    return op.MatMul(x, op.Transpose(weight, perm=[1, 0])) + bias


@function()
def LinearWithoutBias(x, weight):
    """``x @ weight.T``: x (..., in), weight (out, in)."""
    return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))


@function(like=(1, 2, 2))
def LayerNormalizationGrad(dy, x, scale, mean, inv_std, axis: int = -1):
    """Gradient of LayerNormalization from its mean and inverse deviation: dx, dscale, dbias.

    With n = (x - mean) * inv_std and g = dy * scale: dx = inv_std * (g - mean(g) - n * mean(g * n)).
    """
    total = op.Size(op.Shape(x))
    first = op.Mod(op.Constant(value_int=axis) + total, total)
    one = op.Constant(value_int=1)
    normalized = op.Range(first, total, one)
    batch = op.Range(op.Constant(value_int=0), first, one)
    n = op.CastLike((op.CastLike(x, mean) - mean) * inv_std, x)
    g = dy * scale
    centred = g - op.ReduceMean(g, normalized) - n * op.ReduceMean(g * n, normalized)
    dx = centred * op.CastLike(inv_std, x)
    dscale = op.ReduceSum(dy * n, batch, keepdims=0, noop_with_empty_axes=1)
    dbias = op.ReduceSum(dy, batch, keepdims=0, noop_with_empty_axes=1)
    return dx, dscale, dbias


@function(like=(0,))
def DropoutGrad(dy, mask, ratio):
    """Gradient of Dropout: dy / (1 - ratio) where the mask is true, 0 elsewhere."""
    one = op.CastLike(op.Constant(value_float=1.0), ratio)
    return dy * op.CastLike(mask, dy) / op.CastLike(one - ratio, dy)


@function()
def Embedding(weight, indices, padding_idx: int = -1):
    """Rows of a table; the row ``padding_idx`` receives no gradient."""
    return op.Gather(weight, indices, axis=0)


@function()
def AddRows(rows, indices, shape):
    """A matrix of zeros of that shape with each of the rows added at its index.

    By ScatterElements: onnxruntime's ScatterND adds duplicates from several threads at once and loses some (1.31).
    """
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), rows), shape)
    column = op.Unsqueeze(indices, op.Constant(value_ints=[-1]))
    return op.ScatterElements(zeros, op.Expand(column, op.Shape(rows)), rows, axis=0, reduction="add")


@function()
def EmbeddingGrad(dy, indices, shape, padding_idx: int = -1):
    """Gradient of Embedding: rows of dy added at their indices, those of ``padding_idx`` left out."""
    minus_one = op.Constant(value_ints=[-1])
    flat = op.Reshape(indices, minus_one)
    kept = op.Not(op.Equal(flat, op.CastLike(op.Constant(value_int=padding_idx), flat)))
    rows = op.Reshape(
        dy, op.Concat(minus_one, op.Slice(shape, op.Constant(value_ints=[1]), op.Constant(value_ints=[2])), axis=0)
    )
    masked = op.Where(op.Unsqueeze(kept, minus_one), rows, op.CastLike(op.Constant(value_float=0.0), dy))
    return own.AddRows(masked, flat, shape)


@function(like=(0,))
def AddEmbeddingGrad(base, dy, indices, padding_idx: int = -1):
    """A gradient of a table with that of Embedding added to it: a table that is an output layer too has both."""
    return base + own.EmbeddingGrad(dy, indices, op.Shape(base), padding_idx=padding_idx)


@function()
def GatherGrad(dy, indices, shape, axis: int = 0):
    """Gradient of Gather: slices of dy added at their indices along ``axis``.

    dy is read as (before, indices, after), the axis brought to the front and the rest made one row.
    """
    minus_one = op.Constant(value_ints=[-1])
    zero, one = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    rank = op.Size(shape)
    at = op.Reshape(op.Mod(op.Constant(value_int=axis) + rank, rank), minus_one)
    size = op.Gather(shape, at)
    before = op.ReduceProd(op.Slice(shape, zero, at), keepdims=1)
    after = op.ReduceProd(op.Slice(shape, at + one, op.Constant(value_ints=[9223372036854775807])), keepdims=1)
    flat = op.Reshape(indices, minus_one)
    positive = op.Where(op.Less(flat, op.CastLike(zero, flat)), flat + op.CastLike(size, flat), flat)
    slices = op.Reshape(dy, op.Concat(before, op.Shape(flat), after, axis=0), allowzero=1)
    rows = op.Reshape(
        op.Transpose(slices, perm=[1, 0, 2]), op.Concat(op.Shape(flat), before * after, axis=0), allowzero=1
    )
    summed = own.AddRows(rows, positive, op.Concat(size, before * after, axis=0))
    parts = op.Reshape(summed, op.Concat(size, before, after, axis=0), allowzero=1)
    return op.Reshape(op.Transpose(parts, perm=[1, 0, 2]), shape, allowzero=1)
