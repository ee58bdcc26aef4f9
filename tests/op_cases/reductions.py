"""Reductions, sums along an axis, what is largest."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, at, distinct, ints, positive, x


def _prod(a: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        a = a.prod(axis, keepdim=keep)
    return a


def _others(a: Tensor) -> Tensor:
    """For each element of a row the product of the other ones."""
    return torch.stack([torch.cat((a[:, :i], a[:, i + 1 :]), 1).prod(1) for i in range(a.shape[1])], 1)


def _others_of_both(a: Tensor) -> Tensor:
    """The same along the first and the last of three axes."""
    rows = a.transpose(0, 1).flatten(1)
    return _others(rows).view(a.shape[1], a.shape[0], a.shape[2]).transpose(0, 1)


def _degenerate() -> list[Case]:
    """Ties, zeros, infinities."""
    tied, zeros = at([1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, -1.0]), at([0.0, 0.0], [1.5, 0.0], [-2.0, 1.0])
    products = at([2.0, 0.0, -1.5, 0.5], [0.0, 3.0, 0.0, 1.0], [1.0, 2.0, 3.0, -0.5])
    return [
        Case("ReduceMax", (tied, ints(1)), lambda a: a.amax(1, True), label="ties"),
        Case("ReduceMin", (tied, ints(-1)), lambda a: a.amin(1), {"keepdims": 0}, label="ties"),
        Case("ReduceMax", (tied,), lambda a: a.amax(), {"keepdims": 0}, label="ties-all"),
        Case("ReduceProd", (products, ints(1)), lambda a: a.prod(1, True), label="zeros"),
        Case("ReduceProd", (products, ints(0)), lambda a: a.prod(0), {"keepdims": 0}, label="zeros-drop"),
        Case("ProductOfOthers", (products, ints(1)), _others, domain=DOMAIN, label="zeros"),
        Case("ProductOfOthers", (x(2, 3, 2), ints(0, -1)), _others_of_both, domain=DOMAIN, label="axes"),
        Case("ReduceL2", (zeros, ints(1)), lambda a: a.norm(2, 1, True), label="zeros"),
        Case("ReduceL1", (zeros, ints(1)), lambda a: a.norm(1, 1, True), label="zeros"),
        Case("ReduceSumSquare", (zeros, ints(1)), lambda a: a.square().sum(1, True), label="zeros"),
        Case(
            "ReduceLogSumExp", (at([0.0, -math.inf], [90.0, 95.0]), ints(1)), lambda a: a.logsumexp(1, True),
            label="infinite",
        ),
    ]  # fmt: skip


def _products() -> list[Case]:
    """Running ones; several zeros in a row, the first and the last included."""

    def product(axis: int, exclusive: bool = False, reverse: bool = False) -> Callable[[Tensor], Tensor]:
        def run(a: Tensor) -> Tensor:
            a = a.flip(axis) if reverse else a
            if exclusive:
                a = torch.cat((torch.ones_like(a.narrow(axis, 0, 1)), a), axis).narrow(axis, 0, a.shape[axis])
            y = a.cumprod(axis)
            return y.flip(axis) if reverse else y

        return run

    zeros, both = at([2.0, 0.0, -1.5, 0.5, 0.0], [0.0, 3.0, 2.0, 1.0, 4.0]), {"exclusive": 1, "reverse": 1}
    return [
        Case("CumProd", (x(3, 4), np.array(1)), product(1), opset=26),
        Case("CumProd", (x(3, 4), np.array(0)), product(0, reverse=True), {"reverse": 1}, label="reverse", opset=26),
        Case("CumProd", (x(3, 4), np.array(-1)), product(1, True), {"exclusive": 1}, label="exclusive", opset=26),
        Case("CumProd", (x(2, 3, 4), np.array(-2)), product(1, True, True), both, label="both", opset=26),
        Case("CumProd", (zeros, np.array(1)), product(1), label="zeros", opset=26),
        Case("CumProd", (zeros, np.array(1)), product(1, True, True), both, label="zeros-both", opset=26),
    ]  # fmt: skip


def _reductions() -> list[Case]:
    functions = {
        "ReduceSum": lambda a, d, k: a.sum(d, k),
        "ReduceMean": lambda a, d, k: a.mean(d, k),
        "ReduceMax": lambda a, d, k: a.amax(d, k),
        "ReduceMin": lambda a, d, k: a.amin(d, k),
        "ReduceL1": lambda a, d, k: a.abs().sum(d, k),
        "ReduceL2": lambda a, d, k: a.square().sum(d, k).sqrt(),
        "ReduceSumSquare": lambda a, d, k: a.square().sum(d, k),
        "ReduceLogSumExp": lambda a, d, k: a.logsumexp(d, k),
        "ReduceProd": lambda a, d, k: _prod(a, d, k),
        "ReduceLogSum": lambda a, d, k: a.sum(d, k).log(),
    }
    rows = []
    for op, f in functions.items():
        given = positive if op == "ReduceLogSum" else distinct
        older = {} if op == "ReduceSum" else {"opset": 13}
        form = ((given(2, 3, 4), ints(0, -1)), {}) if op == "ReduceSum" else ((given(2, 3, 4),), {"axes": [0, -1]})
        rows += [
            Case(op, form[0], lambda a, f=f: f(a, (0, 2), True), form[1], label="opset13", **older),
            Case(op, (given(2, 3, 4), ints()), lambda a, f=f: f(a, (0, 1, 2), True), label="empty"),
            Case(
                op,
                (given(2, 3, 4), ints()),
                lambda a, f=f: f(a.unsqueeze(-1), (3,), False),
                {"noop_with_empty_axes": 1},
                label="noop",
            ),
            Case(
                op,
                (given(2, 3),),
                lambda a, f=f: f(a.unsqueeze(-1), (2,), False),
                {"noop_with_empty_axes": 1, "keepdims": 0},
                label="noop-missing",
            ),
            Case(op, (given(2, 3, 4), ints(1)), lambda a, f=f: f(a, (1,), True), label="keep"),
            Case(op, (given(2, 3, 4), ints(0, -1)), lambda a, f=f: f(a, (0, 2), False), {"keepdims": 0}, label="drop"),
            Case(op, (given(2, 3, 4),), lambda a, f=f: f(a, (0, 1, 2), False), {"keepdims": 0}, label="all"),
        ]
    rows += [
        *_degenerate(),
        Case("CumSum", (x(3, 4), np.array(1)), lambda a: a.cumsum(1)),
        Case("CumSum", (x(3, 4), np.array(0)), lambda a: a.flip(0).cumsum(0).flip(0), {"reverse": 1}, label="reverse"),
        Case("CumSum", (x(3, 4), np.array(-1)), lambda a: a.cumsum(1) - a, {"exclusive": 1}, label="exclusive"),
        Case("CumSum", (x(2, 3, 4), np.array(-2)), lambda a: a.flip(1).cumsum(1).flip(1) - a, {"exclusive": 1, "reverse": 1}, label="both"),
        *_products(),
        Case("ReduceSum", (x(), ints()), lambda a: a * 1.0, label="scalar"),
        Case("ReduceMean", (x(),), lambda a: a * 1.0, label="scalar"),
        Case("ArgMax", (at([1.0, 3.0, 3.0], [2.0, 2.0, 0.0]),), lambda a: torch.tensor([[2], [1]]),
             {"axis": -1, "select_last_index": 1}, label="last", differentiable=False),
        Case("ArgMin", (at([1.0, 3.0, 0.0], [1.0, 2.0, -3.0]),), lambda a: torch.tensor([0, 1, 1]),
             {"keepdims": 0, "axis": 0}, label="first", differentiable=False),
        Case("ArgMax", (distinct(3, 4),), lambda a: a.argmax(1, True), {"axis": 1}, differentiable=False),
        Case("ArgMin", (distinct(3, 4),), lambda a: a.argmin(1), {"axis": 1, "keepdims": 0}, differentiable=False),
        Case("TopK", (distinct(3, 6), ints(2)), lambda a: tuple(a.topk(2, -1)), outputs=2),
        Case("TopK", (distinct(5, 3), ints(2)), lambda a: tuple(a.topk(2, 0, False)), {"axis": 0, "largest": 0}, outputs=2, label="smallest"),
        Case("TopK", (distinct(2, 5, 3), ints(5)), lambda a: tuple(a.topk(5, 1)), {"axis": -2}, outputs=2, label="sort"),
        Case("TopK", (distinct(7), ints(1)), lambda a: tuple(a.topk(1)), {"axis": 0}, outputs=2, label="one"),
    ]  # fmt: skip
    return rows


CASES = [*_reductions()]
