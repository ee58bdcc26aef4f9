"""Losses: the name of a prediction in, the name of the loss out; targets become inputs of the model.

Formulas are those of the torch.nn class of the same name.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.ir import shapes
from onnxtrain.number_ranges import check_number, check_weights, check_whole
from onnxtrain.onnxblock.blocks import Block, InputLike, input_of_shape
from onnxtrain.onnxblock.ctc import NEVER, ctc_losses

REDUCTIONS = ("mean", "sum", "none")


class Loss(Block, abc.ABC):
    """A loss that reduces its values over all axes.

    Args:
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for a part of a larger formula.
    """

    reductions: tuple[str, ...] = REDUCTIONS

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in self.reductions:
            raise ArtifactError(f"reduction={reduction!r} is not known", cure=f"choose {', '.join(self.reductions)}")
        self.reduction = reduction

    def reduce(self, losses: ir.Value) -> str:
        """The name of the reduced loss, a scalar but for ``"none"``."""
        if self.reduction == "none":
            return str(losses.name)
        kind = self.op.ReduceMean if self.reduction == "mean" else self.op.ReduceSum
        return str(kind(losses, keepdims=0).name)

    def constant(self, array: np.ndarray, like: ir.Value) -> ir.Value:
        """Weights in the element type of a prediction."""
        return self.op.constant(np.asarray(array), shapes.dtype_of(like))


class _Elementwise(Loss):
    """A loss of each element of a prediction and a target of the same shape."""

    @abc.abstractmethod
    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""

    def build(self, loss_input_name: str, target_name: str | None = None) -> str:
        """Add the loss of a prediction against the model input ``target_name``, which is ``target`` by default."""
        target = target_name or self.base.target_name("target")
        x, y = self.value(loss_input_name), self.value(InputLike(loss_input_name)(target))
        with self.op.arithmetic():
            return self.reduce(self.formula(x, y))


class MSELoss(_Elementwise):
    """``(x - y)²``."""

    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""
        d = x - y
        return d * d


class L1Loss(_Elementwise):
    """``|x - y|``."""

    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""
        return self.op.Abs(x - y)


class SmoothL1Loss(_Elementwise):
    """``d²/2β`` where ``d = |x - y|`` is less than β, else ``d - β/2``."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = check_number("beta", beta, least=0)

    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""
        d = self.op.Abs(x - y)
        if self.beta == 0:
            return d
        near = d * d * (0.5 / self.beta)
        return self.op.Where(self.op.Less(d, self.op.like(self.beta, d)), near, d - 0.5 * self.beta)


class BCEWithLogitsLoss(_Elementwise):
    """``weight · ((1 - y)·x + (1 + (pos_weight - 1)·y)·softplus(-x))``, which does not overflow."""

    def __init__(
        self, weight: np.ndarray | None = None, reduction: str = "mean", pos_weight: np.ndarray | None = None
    ) -> None:
        super().__init__(reduction)
        self.weight, self.pos_weight = check_weights("weight", weight), check_weights("pos_weight", pos_weight)

    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""
        positive = self.op.Softplus(-x)
        if self.pos_weight is not None:
            positive = positive * (y * (self.constant(self.pos_weight, x) - 1.0) + 1.0)
        losses = x - x * y + positive
        return losses if self.weight is None else losses * self.constant(self.weight, x)


class BCELoss(_Elementwise):
    """``-weight · (y·log x + (1 - y)·log(1 - x))``, logarithms no less than -100, of probabilities x."""

    def __init__(self, weight: np.ndarray | None = None, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.weight = check_weights("weight", weight)

    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""
        op, least, one = self.op, self.op.like(-100.0, x), self.op.like(1.0, x)
        losses = (y - one) * op.Clip(op.Log(one - x), least) - y * op.Clip(op.Log(x), least)
        return losses if self.weight is None else losses * self.constant(self.weight, x)


class KLDivLoss(_Elementwise):
    """``y · (log y - x)`` of log probabilities x, 0 where y is 0.

    Args:
        reduction: also ``"batchmean"``: the sum divided by the first axis.
        log_target: the target is log probabilities: ``exp(y) · (y - x)``.
    """

    reductions = (*REDUCTIONS, "batchmean")

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction)
        self.log_target = log_target

    def formula(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The loss of each element."""
        op, zero = self.op, self.op.like(0.0, x)
        if self.log_target:
            return op.Exp(y) * (y - x)
        some = op.Greater(y, zero)
        return op.Where(some, y * (op.Log(op.Where(some, y, op.like(1.0, y))) - x), zero)

    def reduce(self, losses: ir.Value) -> str:
        """The name of the reduced loss."""
        if self.reduction != "batchmean":
            return super().reduce(losses)
        op = self.op
        rows = op.cast(op.Squeeze(op.size(losses, 0)), shapes.dtype_of(losses))
        return str(op.Div(op.ReduceSum(losses, keepdims=0), rows).name)


class CrossEntropyLoss(Loss):
    """``-weight[label] · log softmax(scores)[label]``; the mean divides by the sum of weights, ignored labels left out.

    A label outside of the classes is an error when the model runs.

    Args:
        weight: of each class, shape (classes,).
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: label that does not count.
        get_logprob: give the log probabilities back as well.
        label_smoothing: share of the target that is spread evenly over all classes.
        axis: where the classes are: 1, as in torch, or -1 for scores of shape (batch, length, classes).
    """

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        get_logprob: bool = False,
        *,
        label_smoothing: float = 0.0,
        axis: int = 1,
    ) -> None:
        super().__init__(reduction)
        self.weight, self.get_logprob = check_weights("weight", weight, rank=1), get_logprob
        self.ignore_index = None if ignore_index is None else check_whole("ignore_index", ignore_index)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, least=0, most=1)
        self.axis = check_whole("axis", axis)

    def build(self, scores_input_name: str, labels_name: str | None = None) -> str | tuple[str, str]:
        """Add the loss of scores against the model input ``labels_name``, which is ``labels`` by default: int64, of the
        scores' shape without classes.
        """
        scores, labels = _scores_and_labels(self, self.value(scores_input_name), labels_name, self.axis)
        weight = None if self.weight is None else self.constant(self.weight, scores)
        given = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        if not self.label_smoothing:
            loss, log_prob = self.op.SoftmaxCrossEntropyLoss(scores, labels, weight, outputs=2, **given)
            name = str(loss.name)
        else:
            log_prob = self.op.LogSoftmax(scores, axis=1)
            hard = self.op.NegativeLogLikelihoodLoss(log_prob, labels, weight, **given)
            name = self._smoothed(hard, log_prob, labels, weight)
        return (name, str(log_prob.name)) if self.get_logprob else name

    def _smoothed(self, hard: ir.Value, log_prob: ir.Value, labels: ir.Value, weight: ir.Value | None) -> str:
        """``(1 - s)·hard + s / classes · Σ -weight·log_prob``, the sum reduced as the labels' own loss is."""
        op, share = self.op, self.label_smoothing
        with op.arithmetic():
            classes = op.cast(op.Squeeze(op.size(log_prob, 1)), shapes.dtype_of(log_prob))
            spread = log_prob
            if weight is not None:
                form = [-1 if i == 1 else 1 for i in range(shapes.rank(log_prob))]
                spread = spread * op.Reshape(weight, op.ints(*form))
            spread = -op.ReduceSum(spread, op.ints(1), keepdims=0)
            kept = _kept(self, labels, self.ignore_index)
            if kept is not None:
                spread = op.Where(kept, spread, op.like(0.0, spread))
            if self.reduction != "none":
                spread = op.ReduceSum(spread, keepdims=0)
            if self.reduction == "mean":
                spread = spread / self._count(labels, kept, weight, spread)
            return str((hard * (1.0 - share) + spread * (share / classes)).name)

    def _count(self, labels: ir.Value, kept: ir.Value | None, weight: ir.Value | None, like: ir.Value) -> ir.Value:
        """What the mean divides by: the sum of the labels' weights."""
        op, dtype = self.op, shapes.dtype_of(like)
        zero = op.constant(0, shapes.dtype_of(labels))
        if weight is not None:
            share = op.Gather(weight, labels if kept is None else op.Where(kept, labels, zero))
            share = share if kept is None else share * op.cast(kept, dtype)
            return op.ReduceSum(share, keepdims=0)
        return op.cast(op.Size(labels), dtype) if kept is None else op.ReduceSum(op.cast(kept, dtype), keepdims=0)


class NLLLoss(Loss):
    """``-weight[label] · log_prob[label]``, reduced as in CrossEntropyLoss; arguments are the same."""

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        *,
        axis: int = 1,
    ) -> None:
        super().__init__(reduction)
        self.weight, self.axis = check_weights("weight", weight, rank=1), check_whole("axis", axis)
        self.ignore_index = None if ignore_index is None else check_whole("ignore_index", ignore_index)

    def build(self, loss_input_name: str, labels_name: str | None = None) -> str:
        """Add the loss of log probabilities against the model input ``labels_name``, which is ``labels`` by default."""
        log_prob, labels = _scores_and_labels(self, self.value(loss_input_name), labels_name, self.axis)
        weight = None if self.weight is None else self.constant(self.weight, log_prob)
        made = self.op.NegativeLogLikelihoodLoss(
            log_prob, labels, weight, reduction=self.reduction, ignore_index=self.ignore_index
        )
        return str(made.name)


def _scores_and_labels(
    loss: CrossEntropyLoss | NLLLoss, scores: ir.Value, labels_name: str | None, axis: int
) -> tuple[ir.Value, ir.Value]:
    """Scores with their classes on axis 1, and labels that are no class made one that kernels refuse.

    Kernels take -1 for the last class, as they do with any index; here it is as wrong as any other.
    """
    op, dims = loss.op, list(shapes.known_dims(scores))
    if len(dims) < 2:
        raise ArtifactError(
            f"scores have the shape {dims}; a loss over classes takes (batch, classes, ...)",
            cure="give the scores of all classes",
        )
    check_whole("axis", axis, least=-len(dims), most=len(dims) - 1)
    at = axis % len(dims)
    if loss.weight is not None and isinstance(dims[at], int) and len(loss.weight) != dims[at]:
        what = f"the loss has {len(loss.weight)} weights, the scores have {dims[at]} classes"
        raise ArtifactError(what, cure="give a weight for each class")
    labels_name = labels_name or loss.base.target_name("labels")
    rest = [i for i in range(len(dims)) if i != at]
    labels = input_of_shape(loss.base, labels_name, ir.DataType.INT64, scores, rest)
    if at != 1:
        scores = op.Transpose(scores, perm=[rest[0], at, *rest[1:]])
    kept = _kept(loss, labels, loss.ignore_index)
    zero = op.constant(0, shapes.dtype_of(labels))
    below = op.Less(labels, zero) if kept is None else op.And(op.Less(labels, zero), kept)
    beyond = op.cast(op.Squeeze(op.size(scores, 1)), shapes.dtype_of(labels))
    return scores, op.Where(below, beyond, labels)


def _kept(loss: Loss, labels: ir.Value, ignore_index: int | None) -> ir.Value | None:
    """Which labels count; None where all do."""
    if ignore_index is None:
        return None
    return loss.op.Not(loss.op.Equal(labels, loss.op.constant(ignore_index, shapes.dtype_of(labels))))


class CTCLoss(Loss):
    """``-log p(target)`` over all alignments of a sequence of labels to time steps, as torch.nn.CTCLoss.

    The mean divides each sequence's loss by its number of labels, then averages. Where no alignment is possible the
    loss is infinite and its gradient 0. Half precision is computed in single.

    Args:
        blank: the class that stands for no label.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        zero_infinity: an infinite loss counts as 0.
    """

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        super().__init__(reduction)
        self.blank, self.zero_infinity = check_whole("blank", blank, least=0), zero_infinity

    def build(
        self,
        log_probs_name: str,
        targets_name: str = "targets",
        input_lengths_name: str = "input_lengths",
        target_lengths_name: str = "target_lengths",
    ) -> str:
        """Add the loss of log probabilities (time, batch, classes), against int64 inputs of the model:

        labels of shape (batch, longest), and the lengths of sequences and of their labels, of shape (batch,).
        """
        op, given = self.op, self.value(log_probs_name)
        dims = shapes.known_dims(given)
        if len(dims) != 3:
            raise ArtifactError(
                f"{log_probs_name} has the shape {list(dims)}; CTCLoss takes (time, batch, classes)",
                cure="transpose or unsqueeze it",
            )
        targets = self.base.input(targets_name, ir.DataType.INT64, [dims[1], f"{targets_name}_length"])
        lengths, ends = (
            self.base.input(name, ir.DataType.INT64, [dims[1]]) for name in (input_lengths_name, target_lengths_name)
        )
        dtype = shapes.dtype_of(given)
        wide = given if dtype == ir.DataType.DOUBLE else op.cast(given, ir.DataType.FLOAT)
        losses = ctc_losses(op, wide, targets, lengths, ends, self.blank)
        never = op.GreaterOrEqual(losses, op.like(-0.5 * NEVER, losses))
        losses = op.Where(never, op.like(0.0 if self.zero_infinity else np.inf, losses), losses)
        if self.reduction == "mean":
            labels = op.cast(op.Max(ends, op.constant(1)), shapes.dtype_of(losses))
            losses = op.Div(losses, labels)
        return self.reduce(op.cast(losses, dtype))


class WeightedLoss(Block):
    """The sum of several losses, each times its weight.

    Args:
        losses: the blocks.
        weights: one for each; 1 where there is none.

    Its names are one for each loss: of a prediction, or a tuple of a prediction and the name of its target.
    """

    def __init__(self, losses: Sequence[Block], weights: Sequence[float] | None = None) -> None:
        self.losses, self.weights = list(losses), list(weights or [1.0] * len(losses))
        if not self.losses or not all(isinstance(loss, Block) for loss in self.losses):
            raise ArtifactError("the losses of WeightedLoss are no blocks", cure="give instances of losses")
        if len(self.weights) != len(self.losses):
            what = f"{len(self.losses)} losses have {len(self.weights)} weights"
            raise ArtifactError(what, cure="give one weight to each loss")
        self.weights = [check_number("weights", weight) for weight in self.weights]

    def build(self, *names: str | tuple[str, ...]) -> str:
        """Add all losses and their sum."""
        if len(names) != len(self.losses):
            raise ArtifactError(
                f"{len(self.losses)} losses are given {len(names)} predictions", cure="give one to each"
            )
        total: ir.Value | None = None
        for index, (loss, weight, given) in enumerate(zip(self.losses, self.weights, names, strict=True)):
            one = loss(*given) if isinstance(given, tuple) else loss(given, f"target_{index}")
            part = self.op.Mul(self.value(one), weight)
            total = part if total is None else self.op.Add(total, part)
        assert total is not None
        return str(total.name)
