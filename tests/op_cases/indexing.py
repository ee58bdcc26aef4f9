"""Gathering and scattering."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, at, distinct, exactly, flag, index, ints, x


def _table_sum(table: Tensor, dy: Tensor, indices: Tensor) -> Tensor:
    """A table with rows added to it, those of index 3 left out."""
    flat = indices.reshape(-1)
    kept = flat != 3
    return table.index_add(0, flat[kept], dy.reshape(-1, dy.shape[-1])[kept])


def _indexing() -> list[Case]:
    def scatter(a: Tensor, i: Tensor, u: Tensor) -> Tensor:
        return a.scatter(1, i, u)

    column = np.array([[0, 1], [2, 3], [1, 0]], np.int64)
    pairs = np.array([[0, 1], [2, 3]], np.int64)
    return [
        Case("Gather", (x(5, 3), index(2, 4, high=5)), lambda a, i: a[i]),
        Case("Gather", (x(3, 5, 2), index(4, high=5, low=-5)), lambda a, i: a[:, i], {"axis": 1}, label="negative"),
        Case("Gather", (x(3, 5), np.array(2)), lambda a: a[:, 2], {"axis": 1}, label="one"),
        Case(
            "AddEmbeddingGrad", (x(6, 3), x(2, 4, 3), exactly(ints(5, 1, 1, 0, 2, 5, 3, 1).reshape(2, 4))), _table_sum,
            {"padding_idx": 3}, domain=DOMAIN,
        ),
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


def _gathers() -> list[Case]:
    rows = exactly(np.array([[0, -1], [2, 1], [-3, -5], [0, 4]]))
    return [
        Case("Gather", (x(5, 3), index(40, high=1)), lambda a, i: a[i], label="same"),
        Case("Gather", (x(2, 5, 3), index(2, 2, high=5, low=-5)), lambda a, i: a[:, i], {"axis": -2}, label="negative-axis"),
        Case("Gather", (x(3, 5), np.array([[4, -1]], np.int32)), lambda a: a[:, [[4, -1]]], {"axis": 1}, label="int32"),
        Case("GatherElements", (x(4, 5), index(2, 3, high=4, low=-4)), lambda a, i: a.gather(0, i % 4), label="smaller"),
        Case("GatherElements", (x(3, 2, 4), index(3, 6, 4, high=2)), lambda a, i: a.gather(1, i), {"axis": -2}, label="longer"),
        Case("GatherND", (x(3, 5), rows), lambda a, i: a[i[:, 0], i[:, 1]], label="negative", static=(1,)),
        Case("GatherND", (x(3, 5, 2), index(4, 2, 1, high=3)), lambda a, i: a[i[..., 0]], label="slices", static=(1,)),
        Case("GatherND", (x(3, 5, 2), ints(1, -2)), lambda a: a[1, -2], label="one-tuple"),
        Case("GatherND", (x(2, 5, 4), index(2, 3, 1, high=5)), lambda a, i: torch.stack([b[j[:, 0]] for b, j in zip(a, i, strict=True)]),
             {"batch_dims": 1}, label="batch", static=(1,)),
        Case("GatherND", (x(2, 3, 4, 5), index(2, 3, 6, 2, high=4)),
             lambda a, i: torch.stack([b[j[:, 0], j[:, 1]] for b, j in zip(a.flatten(0, 1), i.flatten(0, 1), strict=True)]).reshape(2, 3, 6),
             {"batch_dims": 2}, label="two-batches", static=(1,)),
        Case("Compress", (x(4, 3), np.array([True, False, True])), lambda a: a[[0, 2]], {"axis": 0}),
        Case("Compress", (x(4, 3), exactly(np.array([False, True, True]))), lambda a, c: a[:, 1:], {"axis": -1}, label="last"),
        Case("Compress", (x(4, 3), exactly(np.array([True, False, True, False, True]))), lambda a, c: a.flatten()[:5:2], label="flat"),
    ]  # fmt: skip


def _scatters() -> list[Case]:
    names = {"mul": "prod", "max": "amax", "min": "amin", "add": "sum"}
    rows: list[Case] = []
    for how, name in names.items():

        def elements(a: Tensor, i: Tensor, u: Tensor, axis: int = 1, name: str = name) -> Tensor:
            return a.scatter_reduce(axis, i % a.shape[axis], u, name, include_self=True)

        def slices(a: Tensor, i: Tensor, u: Tensor, name: str = name) -> Tensor:
            wide = i.expand(i.shape[0], a.shape[1]) % a.shape[0]
            return a.scatter_reduce(0, wide, u, name, include_self=True)

        attributes = {"axis": 1, "reduction": how}
        tied, level = at([1.0, 2.0, 0.0], [1.0, -1.0, 3.0]), at([1.0, 2.0, 1.0, 0.0], [3.0, 1.0, 3.0, -1.0])
        rows += [
            Case("ScatterElements", (distinct(3, 4), index(3, 6, high=4), distinct(3, 6)), elements, attributes, label=f"{how}-many"),
            Case("ScatterElements", (distinct(4, 5), index(2, 3, high=4, low=-4), distinct(2, 3)),
                 lambda a, i, u, f=elements: f(a, i, u, 0), {"axis": -2, "reduction": how}, label=f"{how}-smaller"),
            Case("ScatterElements", (tied, exactly(np.array([[0, 0, 1, 2], [2, 0, -1, 1]])), level), elements, attributes, label=f"{how}-ties"),
            Case("ScatterND", (distinct(4, 3), index(6, 1, high=4, low=-4), distinct(6, 3)), slices, {"reduction": how},
                 label=f"{how}-rows", static=(1,)),
            Case("ScatterND", (tied, exactly(np.array([[0], [1], [0]])), at([1.0, 0.0, 0.0], [0.0, -1.0, 3.0], [1.0, 2.0, 5.0])), slices,
                 {"reduction": how}, label=f"{how}-ties", static=(1,)),
            Case("ScatterND", (distinct(3, 4), exactly(np.array([[0, 1], [2, -1], [0, 1]])), distinct(3)),
                 lambda a, i, u, name=name: a.flatten().scatter_reduce(0, torch.tensor([1, 11, 1]), u, name).reshape(3, 4),
                 {"reduction": how}, label=f"{how}-elements", static=(1,)),
        ]  # fmt: skip
    once = np.array([[[0, 2], [1, 0]]], np.int64)
    return [
        *rows,
        Case("ScatterElements", (x(3, 4), exactly(np.array([[-1, 0], [1, -2]])), x(2, 2)),
             lambda a, i, u: a.scatter(1, i % 4, u), {"axis": -1}, label="negative"),
        Case("ScatterND", (x(3, 4, 2), once, x(1, 2, 2)), lambda a, u: a.index_put((torch.tensor([0, 1]), torch.tensor([2, 0])), u[0]),
             label="slices"),
        Case("ScatterND", (x(2, 3), np.array([[-1]], np.int64), x(1, 3)), lambda a, u: torch.cat((a[:1], u)), label="negative"),
    ]  # fmt: skip


def _choices() -> list[Case]:
    def chosen(i: Tensor, v: Tensor, depth: int, axis: int) -> Tensor:
        hot = torch.stack([(i % depth == k) & (i >= -depth) & (i < depth) for k in range(depth)], axis)
        return torch.where(hot, v[1], v[0])

    c = at([3.0, 1.0, 1.0], [2.0, 3.0, 3.0])
    return [
        Case("OneHot", (index(3, high=4), np.array(4), x(2)), lambda i, v: chosen(i, v, 4, -1), label="values"),
        Case("OneHot", (index(3, 2, high=4, low=-4), np.array(4), x(2)), lambda i, v: chosen(i, v, 4, 0), {"axis": 0}, label="axis0"),
        Case("OneHot", (index(3, 2, high=7, low=-7), np.array(4), x(2)), lambda i, v: chosen(i, v, 4, 1), {"axis": -2}, label="outside"),
        Case("Unique", (c,), lambda a: a.reshape(-1)[[1, 3, 0]]),
        Case(
            "Unique", (c,), lambda a: (a.reshape(-1)[[0, 1, 3]], torch.tensor([0, 1, 3]), torch.tensor([0, 1, 1, 2, 0, 0]),
            torch.tensor([3, 2, 1])), {"sorted": 0}, outputs=4, label="unsorted",
        ),
        Case(
            "Unique", (at([1.0, 0.0], [1.0, 0.0], [0.0, 5.0]),), lambda a: (a[[2, 0]], torch.tensor([2, 0]), torch.tensor([1, 1, 0]),
            torch.tensor([1, 2])), {"axis": 0}, outputs=4, label="rows",
        ),
        Case("ConstantOfShape", (exactly(ints(2, 3)),), lambda i: torch.zeros(2, 3), static=(0,), differentiable=False),
        Case("ConstantOfShape", (exactly(ints(4)),), lambda i: torch.full((4,), 7), {"value": ir.tensor([7])}, label="value",
             static=(0,), differentiable=False),
        Case("EyeLike", (x(3, 4),), lambda a: torch.eye(3, 4).to(a.dtype), {"dtype": 1}, differentiable=False),
        Case("EyeLike", (x(4, 3),), lambda a: torch.ones(4, 3).tril(-1).triu(-1).long(), {"dtype": 7, "k": -1}, label="below", differentiable=False),
    ]  # fmt: skip


CASES = [*_indexing(), *_gathers(), *_scatters(), *_choices()]
