"""Matrix products, reductions, normalizations and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten


@lowering("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """As numpy.matmul."""
    return torch.matmul(a, b)


@lowering("Linear", domain=DOMAIN)
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """X @ weight.T + bias in one kernel."""
    return F.linear(x, weight, bias)


@lowering("LinearWithoutBias", domain=DOMAIN)
def linear_without_bias(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T."""
    return F.linear(x, weight)


@lowering("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Tensor:
    """alpha · A' B' + beta · C."""
    a, b = a.t() if transA else a, b.t() if transB else b
    if c is None:
        y = torch.mm(a, b)
        return y if alpha == 1.0 else y.mul_(alpha)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


@lowering("Einsum", view=True)
def einsum(*operands: Tensor, equation: str) -> Tensor:
    """Products summed over the letters that the result lacks."""
    return torch.einsum(equation, *operands)


@lowering("Det")
def det(x: Tensor) -> Tensor:
    """Determinants of the matrices in the last two axes."""
    return torch.linalg.det(x)


@lowering("Cofactors", domain=DOMAIN)
def cofactors(x: Tensor) -> Tensor:
    """det(x) · x⁻ᵀ where all matrices have an inverse, else determinants without each row and column."""
    inverse, info = torch.linalg.inv_ex(x)
    if not bool(info.any()):
        return torch.linalg.det(x)[..., None, None] * inverse.mT
    n = x.shape[-1]
    column = torch.arange(n, device=x.device).unsqueeze(1)
    kept = torch.arange(n - 1, device=x.device)
    without = kept + (kept >= column)
    minors = torch.linalg.det(x[..., without[:, None, :, None], without[None, :, None, :]])
    signs = 1 - 2 * ((column + column.T) % 2)
    return minors * signs


def _axes(x: Tensor, axes: Any, noop: int) -> tuple[int, ...]:
    """The axes of a reduction: none are all, or none with ``noop``."""
    if axes is None or len(axes) == 0:
        return () if noop else tuple(range(x.dim()))
    return tuple(axes)


def _reduction(name: str, compute: Any) -> None:
    @lowering(name, host=(1,), view=True)
    def reduce(x: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        return compute(x, _axes(x, axes, noop_with_empty_axes), bool(keepdims))


def _prod(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted((a % max(1, x.dim()) for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _length(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    """Torch's own norm, which it has of floating numbers: of one element its size, where the square is infinite too."""
    if axes and not x.dtype.is_floating_point:
        return torch.sqrt(torch.sum(x * x, axes, keepdim=keep))
    return torch.linalg.vector_norm(x, 2, axes, keepdim=keep) if axes else torch.abs(x)


@lowering("ProductOfOthers", domain=DOMAIN, host=(1,))
def product_of_others(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The product of all by each, where one is 0 that of the rest for that one.

    Of one element that is no number, or infinite, it is 1 beside zeros, and else no number: as autograd has it.
    """
    is_zero = x == 0
    if all(x.shape[axis] == 1 for axis in axes[: x.dim()]):
        return torch.where(is_zero.any() | is_zero, 1.0, x / x)
    factor = torch.where(is_zero, 1.0, x)
    others = is_zero.sum(tuple(axes), keepdim=True) - is_zero.to(torch.int64)
    return torch.where(others > 0, 0.0, _prod(factor, tuple(axes), True) / factor)


def _extreme(function: Any, x: Tensor, axes: tuple[int, ...], keep: bool, sign: int) -> Tensor:
    """Of nothing the least or largest number there is, which torch refuses."""
    if not axes:
        return x
    if all(x.shape[axis] for axis in axes[: x.dim()]):
        return function(x, axes, keepdim=keep)
    if x.dtype == torch.bool or not x.dtype.is_floating_point:
        bounds = (False, True) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
        nothing = bounds[sign > 0]
    else:
        nothing = sign * float("inf")
    return torch.full_like(torch.sum(x, axes, keepdim=keep), nothing, dtype=x.dtype)


_reduction("ReduceSum", lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype) if axes else x)
_reduction("ReduceMean", lambda x, axes, keep: torch.mean(x, axes, keepdim=keep) if axes else x)
_reduction("ReduceMax", lambda x, axes, keep: _extreme(torch.amax, x, axes, keep, -1))
_reduction("ReduceMin", lambda x, axes, keep: _extreme(torch.amin, x, axes, keep, 1))
_reduction("ReduceProd", _prod)
_reduction("ReduceL1", lambda x, axes, keep: torch.sum(torch.abs(x), axes, keepdim=keep) if axes else torch.abs(x))
_reduction("ReduceL2", _length)
_reduction("ReduceSumSquare", lambda x, axes, keep: torch.sum(x * x, axes, keepdim=keep) if axes else x * x)
_reduction("ReduceLogSum", lambda x, axes, keep: torch.log(torch.sum(x, axes, keepdim=keep)) if axes else torch.log(x))
_reduction("ReduceLogSumExp", lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep) if axes else x)


@lowering("LayerNormalization")
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: int = 1,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor | tuple[Tensor, ...]:
    """ATen's fused kernel, which also gives mean and inverse deviation."""
    y, *statistics = torch.native_layer_norm(x, x.shape[axis:], scale.reshape(x.shape[axis:]), bias, epsilon)
    return y if outputs == 1 else (y, *(s.to(torch_dtype(stash_type)) for s in statistics[: outputs - 1]))


@lowering("LayerNormalizationGrad", domain=DOMAIN)
def layer_normalization_grad(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, inv_std: Tensor, *, outputs: int = 3, axis: int = -1
) -> tuple[Tensor, ...] | Tensor:
    """ATen's fused kernel, which takes mean and inverse deviation on the CPU in the scale's type."""
    if x.device.type == "cpu":
        mean, inv_std = mean.to(scale.dtype), inv_std.to(scale.dtype)
    made = aten.native_layer_norm_backward(dy, x, x.shape[axis:], mean, inv_std, scale, scale, [True] * 3)
    return made[0] if outputs == 1 else made[:outputs]


def _ignored(ignore_index: int | None) -> int:
    return -100 if ignore_index is None else ignore_index


@lowering("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    outputs: int = 1,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Negative log likelihood of the LogSoftmax over axis 1."""
    log_prob = torch.log_softmax(scores, 1)
    loss = F.nll_loss(log_prob, labels.long(), weights, reduction=reduction, ignore_index=_ignored(ignore_index))
    return loss if outputs == 1 else (loss, log_prob)


@lowering("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    log_prob: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Tensor:
    """Minus the log probability of each label."""
    return F.nll_loss(log_prob, labels.long(), weights, reduction=reduction, ignore_index=_ignored(ignore_index))


def _scatter_labels(target: Tensor, dlosses: Tensor, labels: Tensor) -> Tensor:
    index = labels.long().clamp(0, target.shape[1] - 1)  # of those that are none of the classes dlosses are 0
    return target.scatter_add_(1, index.unsqueeze(1), dlosses.neg().unsqueeze(1))


@lowering("SoftmaxCrossEntropyLossGrad", domain=DOMAIN)
def softmax_cross_entropy_grad(dlosses: Tensor, log_prob: Tensor, labels: Tensor) -> Tensor:
    """dlosses · (exp(log_prob) - onehot(labels)), in one buffer; torch's kernel writes to a contiguous one alone."""
    if not log_prob.is_contiguous():
        return _scatter_labels(torch.exp(log_prob).mul_(dlosses.unsqueeze(1)), dlosses, labels)
    at_labels = _scatter_labels(torch.zeros_like(log_prob), dlosses, labels)
    return aten._log_softmax_backward_data.out(at_labels, log_prob, 1, log_prob.dtype, out=at_labels)


@lowering("NegativeLogLikelihoodLossGrad", domain=DOMAIN)
def negative_log_likelihood_grad(dlosses: Tensor, log_prob: Tensor, labels: Tensor) -> Tensor:
    """-dlosses at the labels."""
    return _scatter_labels(torch.zeros_like(log_prob), dlosses, labels)
