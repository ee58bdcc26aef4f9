"""Our operators for the gradients of losses."""

from __future__ import annotations

from onnxscript import opset20 as op

from onnxtrain.ir.functions import function


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
