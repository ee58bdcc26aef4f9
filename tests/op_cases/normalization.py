"""Normalization and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, distinct, exactly, index, positive, x


def _layer_norm(axis: int, outputs: int = 1) -> Callable[..., Any]:
    def run(a: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        axes = tuple(range(axis % a.dim(), a.dim()))
        mean = a.mean(axes, keepdim=True)
        inv_std = (a.var(axes, correction=0, keepdim=True) + 1e-5).rsqrt()
        y = F.layer_norm(a, w.shape, w, b)
        return (y, mean.float(), inv_std.float())[:outputs] if outputs > 1 else y  # as ``stash_type`` says

    return run


def _normalization() -> list[Case]:
    def group_norm(groups: int, eps: float = 1e-5) -> Callable[..., Tensor]:
        def run(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
            w, b = (v.repeat_interleave(a.shape[1] // v.numel()) for v in (w, b))
            return F.group_norm(a, groups, w, b, eps)

        return run

    def rms(a: Tensor, w: Tensor, axis: int, eps: float = 1e-5) -> Tensor:
        axes = tuple(range(axis, 0))
        return a * (a.square().mean(axes, keepdim=True) + eps).rsqrt() * w

    def mvn(*axes: int) -> Callable[[Tensor], Tensor]:
        return lambda a: (a - a.mean(axes, True)) / (a.var(axes, correction=0, keepdim=True).sqrt() + 1e-9)

    def even_lrn(a: Tensor) -> Tensor:
        squares = F.pad(a * a, (0, 0, 0, 0, 1, 2))
        return a * (1.5 + 0.5 / 4 * squares.unfold(1, 4, 1).sum(-1)) ** -0.6

    def odd_lrn(a: Tensor) -> Tensor:
        return F.local_response_norm(a, 3, 0.5, 0.75, 2.0)

    image = x(2, 4, 3, 5)
    return [
        Case("LayerNormalization", (x(2, 3, 4), x(4), x(4)), _layer_norm(-1)),
        Case("LayerNormalization", (x(2, 3, 4), x(4)), _layer_norm(-1), label="no-bias"),
        Case("LayerNormalization", (x(2, 3, 4), x(3, 4), x(3, 4)), _layer_norm(1), {"axis": 1}, label="axis1"),
        Case("LayerNormalization", (x(2, 3, 4), x(4), x(4)), _layer_norm(-1, 3), outputs=3, label="statistics"),
        Case("LayerNormalization", (x(2, 3, 4), x(3, 4)), _layer_norm(1, 2), {"axis": -2}, outputs=2, label="mean"),
        Case("RMSNormalization", (x(2, 3, 4), x(4)), lambda a, w: rms(a, w, -1), opset=23),
        Case("RMSNormalization", (x(2, 3, 4), x(3, 4)), lambda a, w: rms(a, w, -2, 1e-2), {"axis": 1, "epsilon": 1e-2},
             opset=23, label="axis1"),
        Case("RMSNormalization", (x(2, 3, 4), x(3, 1)), lambda a, w: rms(a, w, -2), {"axis": -2}, opset=23, label="broadcast"),
        Case("RMSNorm", (x(2, 3, 4), x(4)), lambda a, w: rms(a, w, -1), domain=DOMAIN),
        Case("RMSNorm", (x(2, 3, 4), x(3, 4)), lambda a, w: rms(a, w, -2, 1e-2), {"axis": 1, "epsilon": 1e-2}, domain=DOMAIN,
             label="axis1"),
        Case("RMSNorm", (x(2, 3, 4), x(1)), lambda a, w: rms(a, w, -1), domain=DOMAIN, label="broadcast"),
        Case("GroupNormalization", (image, x(2), x(2)), group_norm(2), {"num_groups": 2}, label="opset18"),
        Case("GroupNormalization", (image, x(4), x(4)), group_norm(2, 1e-2), {"num_groups": 2, "epsilon": 1e-2}, opset=21),
        Case("GroupNormalization", (x(2, 4, 7), x(4), x(4)), group_norm(4), {"num_groups": 4}, opset=21, label="each"),
        Case("GroupNormalization", (x(2, 6, 2, 3, 2), x(6), x(6)), group_norm(1), {"num_groups": 1}, opset=21, label="3d"),
        Case("MeanVarianceNormalization", (image,), mvn(0, 2, 3)),
        Case("MeanVarianceNormalization", (image,), mvn(1), {"axes": [1]}, label="axis1"),
        Case("LpNormalization", (x(3, 4),), lambda a: a / a.norm(dim=-1, keepdim=True)),
        Case("LpNormalization", (distinct(3, 4, 2),), lambda a: a / a.abs().sum(1, True), {"axis": 1, "p": 1}, label="p1"),
        Case("LRN", (x(2, 6, 3, 4),), odd_lrn, {"size": 3, "alpha": 0.5, "bias": 2.0}),
        Case("LRN", (x(2, 6, 3, 2),), even_lrn, {"size": 4, "alpha": 0.5, "beta": 0.6, "bias": 1.5}, label="even"),
        Case("Hardmax", (distinct(3, 4, 2),), lambda a: F.one_hot(a.argmax(1), 4).to(a.dtype).movedim(-1, 1),
             {"axis": 1}, label="axis1", differentiable=False),
    ]  # fmt: skip


def _losses() -> list[Case]:
    def losses(reduction: str, ignore: int = -100) -> Callable[..., Tensor]:
        of = nll(reduction, ignore)
        return lambda s, i, w=None: of(F.log_softmax(s, 1), i, w)

    def nll(reduction: str, ignore: int = -100) -> Callable[..., Tensor]:
        def each(s: Tensor, i: Tensor, w: Tensor | None = None) -> Tensor:
            if w is None:
                return F.nll_loss(s, i, reduction=reduction, ignore_index=ignore)
            share = w[i] * (i != ignore)  # torch's own has no gradient for the weights of classes
            loss = -share * s.gather(1, i.unsqueeze(1)).squeeze(1)
            return loss if reduction == "none" else loss.sum() / (share.sum() if reduction == "mean" else 1)

        return each

    def with_log(s: Tensor, i: Tensor) -> Any:
        return F.cross_entropy(s, i), F.log_softmax(s, 1)

    plain, spatial = (x(6, 5), index(6, high=5)), (x(3, 5, 4, 2), index(3, 4, 2, high=5))
    rows = [
        Case("SoftmaxCrossEntropyLoss", (x(3, 5, 4), index(3, 4, high=5)), losses("mean", 2), {"ignore_index": 2}, label="ignore"),
        Case("SoftmaxCrossEntropyLoss", plain, with_log, outputs=2, label="log_prob"),
        Case("SoftmaxCrossEntropyLoss", (*spatial, positive(5)), losses("mean", 3), {"ignore_index": 3},
             label="spatial"),
        Case("SoftmaxCrossEntropyLoss", (x(2, 5, 3, 2, 2), index(2, 3, 2, 2, high=5)), losses("sum"),
             {"reduction": "sum"}, label="3d"),
        Case("NegativeLogLikelihoodLoss", plain, nll("mean", 1), {"ignore_index": 1}),
        Case("NegativeLogLikelihoodLoss", (*spatial, positive(5)), nll("none", 0), {"reduction": "none", "ignore_index": 0},
             label="spatial"),
    ]  # fmt: skip
    for r in ("mean", "sum", "none"):
        rows += [
            Case("SoftmaxCrossEntropyLoss", plain, losses(r), {"reduction": r}, label=r),
            Case("SoftmaxCrossEntropyLoss", (*plain, positive(5)), losses(r), {"reduction": r}, label=f"{r}-weights"),
            Case("NegativeLogLikelihoodLoss", (*plain, positive(5)), nll(r), {"reduction": r}, label=f"{r}-weights"),
        ]  # fmt: skip
    return rows


def _linear_losses() -> list[Case]:
    def loss(reduction: str = "mean", ignore: int = -100) -> Callable[..., Tensor]:
        def reference(a: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
            b = rest[0] if len(rest) > 1 else None
            return F.cross_entropy(F.linear(a, w, b), rest[-1].long(), ignore_index=ignore, reduction=reduction)

        return reference

    a, w, b, i = x(6, 4), x(5, 4), x(5), index(6, high=5)
    some = exactly(np.array([1, -100, 4, 0, -100, 2]))
    first = exactly(np.array([1, 0, 4, 0, 0, 2], np.int32))
    return [
        Case("LinearCrossEntropy", (a, w, b, i), loss(), domain=DOMAIN),
        Case("LinearCrossEntropy", (a, w, None, i), loss(), domain=DOMAIN, label="no-bias"),
        Case("LinearCrossEntropy", (a, w, b, some), loss("sum"), {"reduction": "sum"}, DOMAIN, label="sum"),
        Case("LinearCrossEntropy", (a, w, b, some), loss(), domain=DOMAIN, label="ignored"),
        Case("LinearCrossEntropy", (a, w, None, first), loss(ignore=0), {"ignore_index": 0}, DOMAIN, label="ignored-int32"),
        Case("LinearCrossEntropy", (a, w, b, some), loss(), domain=DOMAIN, frozen=(0,), label="weight-only"),
        Case("LinearCrossEntropy", (a, w, b, some), loss(), domain=DOMAIN, frozen=(1, 2), label="x-only"),
    ]  # fmt: skip


CASES = [*_normalization(), *_losses(), *_linear_losses()]
