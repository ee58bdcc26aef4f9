"""Losses and similarities that look into what they are given, or that torch would show step by step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor
_REDUCTIONS = ("none", "mean", "sum")


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@substitute(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """(log var + (input - target)² / var) / 2; torch looks into ``var`` first and refuses what is negative.

    As in torch ``var`` is at least ``eps``, and gets a gradient as if it were not bounded.
    """
    if reduction not in _REDUCTIONS or isinstance(var, float):
        return NotImplemented
    if var.dim() < input.dim() and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    bounded = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (bounded.log() + (input - target) ** 2 / bounded)
    if full:
        losses = losses + 0.5 * math.log(2.0 * math.pi)
    return _reduced(losses, reduction)


@substitute(F.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """x1 · x2 / (max(|x1|, eps) max(|x2|, eps)); as in torch a norm gets a gradient as if it were not bounded."""
    wide = torch.result_type(x1, x2)
    if not wide.is_floating_point:
        return NotImplemented
    one, other = (_over_norm(x.to(wide), dim, eps) for x in torch.broadcast_tensors(x1, x2))
    return (one * other).sum(dim)


def _over_norm(x: Tensor, dim: int, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    return x / torch.where(norm < eps, eps + (norm - norm.detach()), norm)


@substitute(F.huber_loss)
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Any:
    """Of two types, in that of the input: torch says another one of tensors without content."""
    if reduction not in _REDUCTIONS or weight is not None or input.dtype == target.dtype:
        return NotImplemented
    wide = torch.promote_types(input.dtype, target.dtype)
    losses = F.huber_loss(input.to(wide), target.to(wide), reduction="none", delta=delta)
    return _reduced(losses.to(input.dtype), reduction)


@substitute(F.nll_loss)
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Of one example, whose label torch would read: its share of a mean is 1, or there is none and the mean is NaN.

    Under autocast in float32, as there. Labels that are bytes become int64: torch's own formula does not index by them.
    """
    if target.dtype == torch.uint8:
        given = (input, target.long(), weight, size_average, ignore_index, reduce, reduction)
        made = nll_loss(*given)
        return F.nll_loss(*given) if made is NotImplemented else made
    device = input.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            wide = None if weight is None else weight.float()
            return F.nll_loss(input.float(), target, wide, size_average, ignore_index, reduce, reduction)
    if input.dim() != 1 or size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        return NotImplemented
    kept = target != ignore_index
    place = torch.where(kept, target, 0).reshape(1)
    loss = -input[place].reshape(())
    if reduction == "mean":
        return torch.where(kept if weight is None else kept & (weight[place].reshape(()) != 0), loss, math.nan)
    return torch.where(kept, loss if weight is None else loss * weight[place].reshape(()), 0.0)


@substitute(F.soft_margin_loss)
def soft_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the scores' type, whatever that of the labels, which torch's tensors without content take to be wider."""
    if target.dtype == input.dtype:
        return NotImplemented
    return F.soft_margin_loss(input, target.to(input.dtype), *args, **kwargs)


@substitute(F.multilabel_margin_loss)
def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Labels count up to the first that is -1; torch's formula, which a trace would take, counts what comes after."""
    if target.dim() == 0 or size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        return NotImplemented
    counts = (target == -1).cumsum(-1) == 0
    labels = torch.where(counts, target, 0)
    classes = torch.arange(input.shape[-1], device=input.device)
    is_label = ((classes == labels.unsqueeze(-1)) & counts.unsqueeze(-1)).any(-2, keepdim=True)
    apart = (1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)).relu()
    lost = torch.where(is_label | ~counts.unsqueeze(-1), 0.0, apart).sum((-2, -1)) / input.shape[-1]
    return _reduced(lost, reduction)


@substitute(torch.ctc_loss)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """One operator: a step of it, which torch would show, returns a table as long as the longest target."""
    lengths = (n if isinstance(n, Tensor) else torch.tensor(n) for n in (input_lengths, target_lengths))
    return torch.ops.onnxtrain.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


@substitute(F.ctc_loss)
def ctc_loss_by_name(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """The same with the reduction by name."""
    if reduction not in _REDUCTIONS:
        return NotImplemented
    kind = _REDUCTIONS.index(reduction)
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, kind, zero_infinity)


def _as_a_batch(loss: Callable[..., Any]) -> None:
    parameters = inspect.signature(loss)

    @substitute(loss)
    def of_one(*args: Any, **kwargs: Any) -> Any:
        """Scores of one example as a batch, since torch would read its label; no chunks, which depend on sizes.

        Labels that are bytes become int64.
        """
        given = parameters.bind(*args, **kwargs).arguments
        is_other, single = given.pop("options", None) is not None, given["input"].dim() == 1
        if given["target"].dtype == torch.uint8:
            is_other, given["target"] = True, given["target"].long()
        if not single or given["target"].is_floating_point():
            return loss(**given) if is_other else NotImplemented
        made = loss(**given | {name: given[name].unsqueeze(0) for name in ("input", "target")})
        return made.reshape(()) if made.dim() else made


for _name in ("cross_entropy", "linear_cross_entropy"):  # the second is new in torch 2.13
    if hasattr(F, _name):
        _as_a_batch(getattr(F, _name))


_CTC = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, int reduction, bool zero"
)


@torch.library.custom_op("onnxtrain::ctc_loss", mutates_args=(), schema=f"({_CTC}) -> Tensor")
def _ctc_loss(log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.ctc_loss(log_probs, *rest)


@_ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, of: Tensor, blank: int, reduction: int, zero: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1] if reduction == 0 else ())
