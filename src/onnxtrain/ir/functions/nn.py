"""Our operators of neural network layers: fused forms and their gradients."""

from __future__ import annotations

from onnxscript import opset20 as op

from onnxtrain.ir.functions import function


@function(like=(0,))
def Detach(x):
    """The identity through which no gradient flows (torch's ``detach``)."""
    return op.Identity(x)


@function()
def Linear(x, weight, bias):
    """``x @ weight.T + bias``: x (..., in), weight (out, in), bias (out)."""
    return op.MatMul(x, op.Transpose(weight, perm=[1, 0])) + bias


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
def EmbeddingGrad(dy, indices, shape, padding_idx: int = -1):
    """Gradient of Embedding: rows of dy added at their indices, those of ``padding_idx`` left out."""
    kept = op.Not(op.Equal(indices, op.CastLike(op.Constant(value_int=padding_idx), indices)))
    masked = op.Where(
        op.Unsqueeze(kept, op.Constant(value_ints=[-1])), dy, op.CastLike(op.Constant(value_float=0.0), dy)
    )
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), dy), shape)
    return op.ScatterND(zeros, op.Unsqueeze(indices, op.Constant(value_ints=[-1])), masked, reduction="add")


@function()
def GatherGrad(dy, indices, shape, axis: int = 0):
    """Gradient of Gather: slices of dy added at their indices along ``axis``.

    The axis is brought to the front by a reshape to (before, axis, after) on both sides.
    """
    minus_one = op.Constant(value_ints=[-1])
    rank = op.Size(shape)
    first = op.Reshape(op.Mod(op.Constant(value_int=axis) + rank, rank), minus_one)
    before = op.ReduceProd(op.Slice(shape, op.Constant(value_ints=[0]), first), keepdims=1)
    size = op.Gather(shape, first)
    after = op.ReduceProd(
        op.Slice(shape, first + op.Constant(value_ints=[1]), op.Constant(value_ints=[9223372036854775807])), keepdims=1
    )
    flat = op.Reshape(indices, minus_one)
    rows = op.Reshape(dy, op.Concat(before, op.Shape(flat), after, axis=0), allowzero=1)
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), dy), op.Concat(size, before, after, axis=0))
    summed = op.ScatterND(zeros, op.Unsqueeze(flat, minus_one), op.Transpose(rows, perm=[1, 0, 2]), reduction="add")
    return op.Reshape(op.Transpose(summed, perm=[1, 0, 2]), shape, allowzero=1)
