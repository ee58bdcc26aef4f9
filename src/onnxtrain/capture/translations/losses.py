"""Cross entropy in all its forms, where torch.onnx knows only the plain one, and the loss of alignments (CTC)."""

from __future__ import annotations

import json
from typing import Any

import torch

from onnxtrain.capture import loss_functions  # noqa: F401  (defines the operator of ctc_loss)
from onnxtrain.capture.aten import ATEN
from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import like, number, reduced, translation

aten = torch.ops.aten
_REDUCTIONS = ("none", "mean", "sum")


@translation(aten.cross_entropy_loss.default)
def cross_entropy(scores, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    """One SoftmaxCrossEntropyLoss node for plain labels; torch's formula for smoothed labels and probabilities."""
    kind, rank = _REDUCTIONS[reduction], len(scores.shape)
    probabilities = target.dtype is not None and target.dtype.is_floating_point()
    if rank > 1:
        return _loss(scores, target, weight, kind, ignore_index, label_smoothing, rank, probabilities)
    first = op.Constant(value_ints=[0])
    scores, target = op.Unsqueeze(scores, first), op.Unsqueeze(target, first)
    made = _loss(scores, target, weight, kind, ignore_index, label_smoothing, 2, probabilities)
    return op.Squeeze(made, first) if kind == "none" else made


@translation(aten.nll_loss_nd.default)
def nll_loss(log_prob, target, weight=None, reduction=1, ignore_index=-100):
    """One NegativeLogLikelihoodLoss node, also where classes are followed by several axes."""
    given = [log_prob, target] if weight is None else [log_prob, target, weight]
    attributes = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index}
    return record_node("NegativeLogLikelihoodLoss", given, attributes, domain="")


@translation(aten.mse_loss.default)
def mse_loss(x, target, reduction=1):
    """The squares of differences, or their mean or sum."""
    return reduced(op.Pow(op.Sub(x, target), like(2, x)), reduction)


@translation(aten.huber_loss.default)
def huber_loss(x, target, reduction=1, delta=1.0):
    """z - half of what is within delta, times that; no square of a distance is infinite, nor its gradient no number."""
    if x.dtype != target.dtype:
        return NotImplemented
    distance = op.Abs(op.Sub(x, target))
    within = op.Min(distance, like(delta, x))
    return reduced(op.Mul(within, op.Sub(distance, op.Mul(within, like(0.5, x)))), reduction)


@translation(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(x, target, weight=None, pos_weight=None, reduction=1):
    """By logarithms of the sigmoid of each sign, which have derivatives of any order at 0, too."""
    if x.dtype != target.dtype:
        return NotImplemented
    right = op.Mul(target, op.Softplus(op.Neg(x)))
    right = right if pos_weight is None else op.Mul(right, pos_weight)
    loss = op.Add(right, op.Mul(op.Sub(like(1, x), target), op.Softplus(x)))
    return reduced(loss if weight is None else op.Mul(loss, weight), reduction)


@translation(torch.ops.onnxtrain.ctc_loss.default)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    """Torch's own operator, lengths as tensors."""
    arguments = [*({"input": index} for index in range(4)), blank, reduction, zero_infinity]
    call = {"operator": "aten::ctc_loss", "overload": "Tensor", "arguments": json.dumps(arguments), "keywords": "{}"}
    return record_node(ATEN, [log_probs, targets, input_lengths, target_lengths], {**call, "results": 1})


def _loss(
    scores: Any, target: Any, weight: Any, kind: str, ignore: int, smoothing: float, rank: int, probabilities: bool
) -> Any:
    if probabilities:
        return _of_probabilities(scores, target, weight, kind, smoothing, rank)
    given = [scores, target] if weight is None else [scores, target, weight]
    attributes = {"reduction": kind, "ignore_index": ignore}
    if not smoothing:
        return record_node("SoftmaxCrossEntropyLoss", given, attributes, domain="")
    log_prob = op.LogSoftmax(scores, axis=1)
    nll = record_node("NegativeLogLikelihoodLoss", [log_prob, *given[1:]], attributes, domain="")
    kept = op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore), target)))
    zero = op.CastLike(number(0.0), scores)
    spread = op.Where(kept, op.Neg(_over_classes(log_prob, weight, rank)), zero)
    if kind == "sum":
        spread = op.ReduceSum(spread, keepdims=0)
    if kind == "mean":
        share = op.CastLike(kept, scores)
        if weight is not None:
            safe = op.Where(kept, target, op.CastLike(op.Constant(value_int=0), target))
            share = op.Mul(share, op.Gather(weight, safe))
        spread = op.Div(op.ReduceSum(spread, keepdims=0), op.ReduceSum(share, keepdims=0))
    part = op.Div(op.CastLike(number(smoothing), scores), _classes(scores))
    return op.Add(op.Mul(nll, op.CastLike(number(1.0 - smoothing), scores)), op.Mul(spread, part))


def _of_probabilities(scores: Any, target: Any, weight: Any, kind: str, smoothing: float, rank: int) -> Any:
    """Minus the expected log probability; the mean is over rows."""
    if smoothing:
        rest = op.Div(op.CastLike(number(smoothing), scores), _classes(scores))
        target = op.Add(op.Mul(target, op.CastLike(number(1.0 - smoothing), scores)), rest)
    losses = op.Neg(_over_classes(op.Mul(op.LogSoftmax(scores, axis=1), target), weight, rank))
    if kind == "none":
        return losses
    return op.ReduceMean(losses, keepdims=0) if kind == "mean" else op.ReduceSum(losses, keepdims=0)


def _over_classes(values: Any, weight: Any, rank: int) -> Any:
    """Sum over axis 1, each class with its weight."""
    if weight is not None:
        shape = [1, -1] + [1] * (rank - 2)
        values = op.Mul(values, op.Reshape(weight, op.Constant(value_ints=shape)))
    return op.ReduceSum(values, op.Constant(value_ints=[1]), keepdims=0)


def _classes(scores: Any) -> Any:
    """The number of classes in the scores' type."""
    return op.CastLike(op.Squeeze(op.Shape(scores, start=1, end=2)), scores)
