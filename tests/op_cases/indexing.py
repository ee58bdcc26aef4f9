"""Gathering and scattering."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, flag, index, x


def _indexing() -> list[Case]:
    def scatter(a: Tensor, i: Tensor, u: Tensor) -> Tensor:
        return a.scatter(1, i, u)

    column = np.array([[0, 1], [2, 3], [1, 0]], np.int64)
    pairs = np.array([[0, 1], [2, 3]], np.int64)
    return [
        Case("Gather", (x(5, 3), index(2, 4, high=5)), lambda a, i: a[i]),
        Case("Gather", (x(3, 5, 2), index(4, high=5, low=-5)), lambda a, i: a[:, i], {"axis": 1}, label="negative"),
        Case("Gather", (x(3, 5), np.array(2)), lambda a: a[:, 2], {"axis": 1}, label="one"),
        Case("Embedding", (x(6, 3), index(2, 4, high=6)), lambda w, i: F.embedding(i, w), domain=DOMAIN),
        Case(
            "Embedding", (x(6, 3), index(2, 9, high=6)), lambda w, i: F.embedding(i, w, padding_idx=1),
            {"padding_idx": 1}, DOMAIN, label="padding",
        ),
        Case("GatherElements", (x(3, 5), index(3, 4, high=5)), lambda a, i: a.gather(1, i), {"axis": 1}),
        Case("GatherND", (x(3, 5), index(4, 2, high=3)), lambda a, i: a[i[:, 0], i[:, 1]], static=(1,)),
        Case("ScatterElements", (x(3, 4), column, x(3, 2)), lambda a, u: scatter(a, torch.tensor(column), u), {"axis": 1}),
        Case(
            "ScatterElements", (x(3, 4), index(3, 2, high=4), x(3, 2)), lambda a, i, u: a.scatter_add(1, i, u),
            {"axis": 1, "reduction": "add"}, label="add",
        ),
        Case(
            "ScatterND", (x(3, 4), pairs, x(2)),
            lambda a, u: a.index_put((torch.tensor([0, 2]), torch.tensor([1, 3])), u),
        ),
        Case(
            "ScatterND", (x(3, 4), index(5, 1, high=3), x(5, 4)),
            lambda a, i, u: a.index_put((i[:, 0],), u, accumulate=True), {"reduction": "add"}, label="add", static=(1,),
        ),
        Case("NonZero", (flag(3, 4),), lambda a: a.nonzero().T, differentiable=False),
        Case(
            "OneHot", (index(3, high=4), np.array(4), np.array([0.0, 1.0])), lambda i: F.one_hot(i, 4),
            differentiable=False,
        ),
    ]  # fmt: skip


CASES = [*_indexing()]
