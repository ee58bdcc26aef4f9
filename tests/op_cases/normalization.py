"""Normalization and losses."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F

from op_cases.case import Case, Tensor, index, positive, x


def _normalization() -> list[Case]:
    def layer_norm(a: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.layer_norm(a, w.shape, w, b)

    def losses(reduction: str, ignore: int = -100) -> Callable[..., Tensor]:
        return lambda s, i, w=None: F.cross_entropy(s, i, w, reduction=reduction, ignore_index=ignore)

    rows = [
        Case("LayerNormalization", (x(2, 3, 4), x(4), x(4)), layer_norm),
        Case("LayerNormalization", (x(2, 3, 4), x(4)), layer_norm, label="no-bias"),
        Case("LayerNormalization", (x(2, 3, 4), x(3, 4), x(3, 4)), layer_norm, {"axis": 1}, label="axis1"),
        Case(
            "SoftmaxCrossEntropyLoss", (x(6, 5), index(6, high=5), positive(5)), losses("mean"), label="weights", frozen=(2,),
        ),
        Case(
            "SoftmaxCrossEntropyLoss", (x(3, 5, 4), index(3, 4, high=5)), losses("mean", 2),
            {"ignore_index": 2}, label="ignore",
        ),
        Case(
            "NegativeLogLikelihoodLoss", (x(6, 5), index(6, high=5)), lambda s, i: F.nll_loss(s, i, ignore_index=1),
            {"ignore_index": 1},
        ),
    ]  # fmt: skip
    rows += [
        Case("SoftmaxCrossEntropyLoss", (x(6, 5), index(6, high=5)), losses(r), {"reduction": r}, label=r)
        for r in ("mean", "sum", "none")
    ]
    return rows


CASES = [*_normalization()]
