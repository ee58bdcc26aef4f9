"""Cross entropy of a linear layer, some rows at a time: its scores are never all there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
_FEWEST = 64  # rows at a time, where the layer is narrower


@lowering("LinearCrossEntropy", domain=DOMAIN)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    needed: Sequence[bool] = (True,),
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor | tuple[Tensor | None, ...]:
    """The loss and, in the same pass, those gradients that are read; rows whose label is ignored are left out.

    On a device they count nothing: which they are is not waited for.

    Raises:
        IndexError: a label is none of the classes.
    """
    there, is_mean = labels != ignore_index, reduction == "mean"
    wanted = (*needed, False, False, False)[1:4]
    compute = _of_chosen if labels.device.type == "cpu" else _of_all
    made = compute((x, weight, bias, labels), there, is_mean, wanted)
    return made[0] if len(needed) == 1 else made[: len(needed)]


_Operands = tuple[Tensor, Tensor, Tensor | None, Tensor]
_Made = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _of_chosen(operands: _Operands, there: Tensor, is_mean: bool, wanted: Sequence[bool]) -> _Made:
    """The loss and gradients, of the rows that have a label alone."""
    x, weight, bias, labels = operands
    rows = there.nonzero().squeeze(1)
    some = len(rows) < len(labels)
    chosen, at = (x.index_select(0, rows), labels.index_select(0, rows)) if some else (x, labels)
    _check(at, weight.shape[0])
    count = len(rows) if is_mean else 1
    total, dx, dweight, dbias = _in_chunks(chosen, weight, bias, at.long(), 1.0 / max(count, 1), wanted)
    if some and dx is not None:
        dx = dx.new_zeros(x.shape).index_copy_(0, rows, dx)
    return total / count, dx, dweight, dbias


def _of_all(operands: _Operands, there: Tensor, is_mean: bool, wanted: Sequence[bool]) -> _Made:
    """The loss and gradients, of all rows: those without a label have a share of 0."""
    x, weight, bias, labels = operands
    count = there.sum() if is_mean else there.new_ones((), dtype=torch.int64)
    shares = there.to(torch.promote_types(x.dtype, torch.float32)) / count.clamp(min=1)
    at = labels.long().masked_fill(~there, 0)
    total, dx, dweight, dbias = _in_chunks(x, weight, bias, at, 1.0, wanted, shares.unsqueeze(1))
    return total / count, dx, dweight, dbias


def _check(labels: Tensor, classes: int) -> None:
    if not len(labels):
        return
    low, high = (int(extreme) for extreme in labels.aminmax())
    if low < 0 or high >= classes:
        raise IndexError(f"label {low if low < 0 else high} of a cross entropy is none of the {classes} classes")


def _in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factor: float,
    wanted: Sequence[bool],
    shares: Tensor | None = None,
) -> _Made:
    """The sum of the losses, and the gradients of ``factor`` times it; half types are summed in float32.

    With ``shares`` (rows, 1) those of the losses times these; a row whose share is 0 adds nothing to the sum either.

    With as many rows at a time as the layer is wide, their scores take the memory of the weight, and adding to its
    gradient once more costs little beside the products.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = -(-len(x) // max(_FEWEST, weight.shape[1]))
    size = -(-len(x) // max(1, parts))
    memory = x.new_empty((min(size, len(x)), weight.shape[0]), dtype=dtype)
    dx = x.new_empty(x.shape, dtype=dtype) if wanted[0] else None
    dweight = weight.new_empty(weight.shape, dtype=dtype) if wanted[1] else None
    if dweight is not None and not parts:
        dweight.zero_()
    dbias = weight.new_zeros(weight.shape[:1], dtype=dtype) if wanted[2] else None
    total = x.new_zeros((), dtype=dtype)
    for first in range(0, len(x), max(1, size)):
        part, at = x[first : first + size], labels[first : first + size].unsqueeze(1)
        scores = _scores(part, weight, bias, memory[: len(part)])
        own = None if shares is None else shares[first : first + size]
        total += _losses(scores, at, own).sum()
        if not any(wanted):
            continue
        dscores = _become_gradients(scores, at, own).to(x.dtype)
        if dx is not None:
            _add_product(dx[first : first + size], dscores, weight, factor, keep=0)
        if dweight is not None:
            _add_product(dweight, dscores.t(), part, factor, keep=int(first > 0))
        if dbias is not None:
            dbias.add_(scores.sum(0), alpha=factor)
    return total, dx, dweight, dbias


def _scores(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if x.dtype != out.dtype:
        return out.copy_(torch.nn.functional.linear(x, weight, bias))
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _losses(scores: Tensor, labels: Tensor, shares: Tensor | None) -> Tensor:
    """The loss of each row; the scores become probabilities, of which the largest has the sum of exponentials."""
    top, chosen = scores.amax(1, keepdim=True), scores.gather(1, labels)
    torch.softmax(scores, 1, out=scores)
    losses = top - scores.amax(1, keepdim=True).log() - chosen
    return losses if shares is None else losses.masked_fill(shares == 0, 0.0)


def _become_gradients(scores: Tensor, labels: Tensor, shares: Tensor | None) -> Tensor:
    """The gradients of the losses by the scores, in place of their probabilities."""
    scores.scatter_add_(1, labels, scores.new_full((1, 1), -1.0).expand_as(labels))
    return scores if shares is None else scores.mul_(shares).masked_fill_(shares == 0, 0.0)


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float, keep: int) -> None:
    """``total = keep * total + factor * a @ b``."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=keep, alpha=factor)
    elif keep:
        total.add_(torch.mm(a, b), alpha=factor)
    else:
        torch.mul(torch.mm(a, b), factor, out=total)


def scale_gradient_(g: Tensor, factor: Tensor) -> Tensor:
    """The product, in place; on the host, where the factor can be seen to be 1, nothing is done."""
    return g if factor.device.type == "cpu" and factor.item() == 1.0 else g.mul_(factor)


@lowering("ScaleGradient", domain=DOMAIN, inplace=scale_gradient_)
def scale_gradient(g: Tensor, factor: Tensor) -> Tensor:
    """The product."""
    return g * factor
