"""Our operators for losses and their gradients."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op, own


@function(like=(1,))
def SoftmaxCrossEntropyLossGrad(dlosses, log_prob, labels):
    """Gradient of the scores: ``dlosses * (exp(log_prob) - onehot(labels))``.

    dlosses and labels have shape (N, d...), log_prob (N, classes, d...). Labels outside the classes (ignored ones)
    are read as class 0; their entry in dlosses must be 0.
    """
    classes = op.Squeeze(op.Shape(log_prob, start=1, end=2))
    zero = op.Constant(value_int=0)
    index = op.Cast(labels, to=7)
    safe = op.Where(op.Or(op.Less(index, zero), op.GreaterOrEqual(index, classes)), zero, index)
    g = op.Unsqueeze(dlosses, op.Constant(value_ints=[1]))
    spread = op.Exp(log_prob) * g
    return op.ScatterElements(
        spread, op.Unsqueeze(safe, op.Constant(value_ints=[1])), op.Neg(g), axis=1, reduction="add"
    )


@function(like=(1,))
def NegativeLogLikelihoodLossGrad(dlosses, log_prob, labels):
    """Gradient of the log probabilities: ``-dlosses`` at the labels, 0 elsewhere; labels as above."""
    classes = op.Squeeze(op.Shape(log_prob, start=1, end=2))
    zero = op.Constant(value_int=0)
    index = op.Cast(labels, to=7)
    safe = op.Where(op.Or(op.Less(index, zero), op.GreaterOrEqual(index, classes)), zero, index)
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), log_prob), op.Shape(log_prob))
    g = op.Neg(op.Unsqueeze(dlosses, op.Constant(value_ints=[1])))
    return op.ScatterElements(zeros, op.Unsqueeze(safe, op.Constant(value_ints=[1])), g, axis=1, reduction="add")


@function(optional=("bias",))
def LinearCrossEntropy(x, weight, bias, labels, ignore_index: int = -100, reduction: str = "mean"):
    """Cross entropy of the scores ``x @ weight.T + bias`` (T, V) and the labels (T), and its gradients.

    x (T, H), weight (V, H), bias (V) or left out. Rows whose label is ``ignore_index`` count for nothing; ``reduction``
    is "mean" (NaN where no row counts) or "sum". Scores of half types are made in that type and then read as float32,
    which the loss and the gradients have.

    Returns the loss (a scalar), and the gradients of x, weight and bias for a gradient of 1 of the loss.
    """
    scores = op.Gemm(x, weight, op.CastLike(bias, x), transB=1)
    loss, log_prob = op.SoftmaxCrossEntropyLoss(scores, labels, ignore_index=ignore_index, reduction=reduction)
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    counts = op.Not(op.Equal(labels, op.CastLike(op.Constant(value_int=ignore_index), labels)))
    count = op.ReduceSum(op.CastLike(counts, x), keepdims=0)
    # As many as count where losses are summed, 1 where their mean is taken.
    ones = op.NegativeLogLikelihoodLoss(
        op.Expand(op.Neg(one), op.Shape(scores)), labels, ignore_index=ignore_index, reduction=reduction
    )
    dlosses = op.Where(counts, ones / op.Max(count, one), zero)
    dscores = own.SoftmaxCrossEntropyLossGrad(dlosses, log_prob, labels)
    dweight = op.Gemm(dscores, x, transA=1)
    return loss, op.MatMul(dscores, weight), dweight, op.ReduceSum(dscores, op.Constant(value_ints=[0]), keepdims=0)


@function(like=(0,))
def ScaleGradient(g, factor):
    """A gradient that was computed for a gradient of 1 of a loss, times that of the loss (a scalar)."""
    return g * factor
