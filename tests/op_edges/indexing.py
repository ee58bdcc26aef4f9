"""Axes, index types and repeated indices of gathering and scattering."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from op_table import Case, Tensor, index, ints, x

from onnxtrain.ir.graphs import DOMAIN

AXIS1 = {"axis": 1}


def _gather() -> list[Case]:
    def rows(a: Tensor, i: Tensor) -> Tensor:
        return a[i.long()]

    return [
        Case("Gather", (x(5, 3), index(4, high=5, dtype="int32")), rows, label="int32"),
        Case("Gather", (x(2, 3, 5), index(2, 2, high=5, low=-5)), lambda a, i: a[..., i], {"axis": -1}, label="last"),
        Case("Gather", (x(5), np.array(-1)), lambda a: a[-1], label="scalar"),
        Case("Gather", (index(5, 3, high=9), index(4, high=5)), rows, label="integers", differentiable=False),
        Case("Embedding", (x(6, 3), index(2, 4, high=6, dtype="int32")), lambda w, i: F.embedding(i, w), domain=DOMAIN,
             label="int32"),
        Case("Embedding", (x(6, 3), index(9, high=6)), lambda w, i: F.embedding(i, w, padding_idx=0),
             {"padding_idx": 0}, DOMAIN, label="padding-first"),
        Case("GatherElements", (x(3, 5), index(2, 5, high=3, low=-3)),
             lambda a, i: a.gather(0, torch.where(i < 0, i + a.shape[0], i)), label="negative"),
        Case("GatherElements", (x(2, 3, 5), index(2, 3, 1, high=5, dtype="int32")),
             lambda a, i: a.gather(2, i.long()), {"axis": -1}, label="int32"),
        Case("GatherND", (x(3, 5, 2), index(4, 1, high=3)), lambda a, i: a[i[:, 0]], static=(1,), label="slices"),
        Case("GatherND", (x(3, 5), index(2, 4, 2, high=3)), lambda a, i: a[i[..., 0], i[..., 1]], static=(1,),
             label="batch-of-tuples"),
        Case("GatherND", (x(3, 5, 2), index(3, 4, 1, high=5)),
             lambda a, i: a[torch.arange(a.shape[0])[:, None], i[..., 0]], {"batch_dims": 1}, static=(1,),
             label="batch-dims", differentiable=False, missing=True),
        Case("OneHot", (index(3, 2, high=4, low=-4), ints(4), np.array([-1.0, 2.0])),
             lambda i: (F.one_hot(i % 4, 4) * 3 - 1).permute(2, 0, 1).double(), {"axis": 0}, label="axis0",
             differentiable=False),
        Case("OneHot", (index(3, high=9), np.array(4), np.array([0, 1])), lambda i: F.one_hot(i, 9)[:, :4],
             label="outside", differentiable=False),
    ]  # fmt: skip


def _scatter() -> list[Case]:
    def reduced(how: str) -> dict[str, str]:
        return {"axis": 1, "reduction": how}

    column = np.array([[-1, 1], [2, 3], [1, -4]], np.int64)
    once = torch.tensor(column % 4)
    narrow = index(3, 2, high=4, dtype="int32")
    return [
        Case("ScatterElements", (x(3, 4), column, x(3, 2)), lambda a, u: a.scatter(1, once, u), AXIS1,
             label="negative"),
        Case("ScatterElements", (x(3, 4), narrow, x(3, 2)), lambda a, i, u: a.scatter_add(1, i.long(), u),
             reduced("add"), label="int32"),
        Case("ScatterElements", (x(3, 4), narrow, x(3, 2)),
             lambda a, i, u: a.scatter_reduce(1, i.long(), u, "amax"), reduced("max"), label="max",
             differentiable=False, missing=True),
        Case("ScatterElements", (x(3, 4), narrow, x(3, 2)),
             lambda a, i, u: a.scatter_reduce(1, i.long(), u, "prod"), reduced("mul"), label="mul",
             differentiable=False, missing=True),
        Case("ScatterND", (x(5, 4), ints(3, 0).reshape(2, 1), x(2, 4)),
             lambda a, u: a.index_put((torch.tensor([3, 0]),), u), label="rows"),
        Case("ScatterND", (x(3, 4), ints(-1, 0, -3, 2).reshape(2, 2), x(2)),
             lambda a, u: a.index_put((torch.tensor([2, 0]), torch.tensor([0, 2])), u), label="negative"),
        Case("ScatterND", (x(3, 4), index(5, 2, high=3), x(5)),
             lambda a, i, u: a.index_put((i[:, 0], i[:, 1]), u, accumulate=True), {"reduction": "add"}, static=(1,),
             label="add-elements"),
        Case("ScatterND", (x(4, 3), index(2, 1, high=4), x(2, 3)),
             lambda a, i, u: a.index_reduce(0, i[:, 0], u, "amin"), {"reduction": "min"}, static=(1,), label="min",
             differentiable=False, missing=True),
    ]  # fmt: skip


ROWS = [*_gather(), *_scatter()]
