"""Reductions, sums along an axis, what is largest."""

from __future__ import annotations

import numpy as np

from op_cases.case import Case, distinct, ints, x


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
    }
    rows = []
    for op, f in functions.items():
        rows += [
            Case(op, (distinct(2, 3, 4), ints(1)), lambda a, f=f: f(a, (1,), True), label="keep"),
            Case(
                op, (distinct(2, 3, 4), ints(0, -1)), lambda a, f=f: f(a, (0, 2), False), {"keepdims": 0}, label="drop"
            ),
            Case(op, (distinct(2, 3, 4),), lambda a, f=f: f(a, (0, 1, 2), False), {"keepdims": 0}, label="all"),
        ]
    rows += [
        Case("CumSum", (x(3, 4), np.array(1)), lambda a: a.cumsum(1)),
        Case("CumSum", (x(3, 4), np.array(0)), lambda a: a.flip(0).cumsum(0).flip(0), {"reverse": 1}, label="reverse"),
        Case("ArgMax", (distinct(3, 4),), lambda a: a.argmax(1, True), {"axis": 1}, differentiable=False),
        Case("ArgMin", (distinct(3, 4),), lambda a: a.argmin(1), {"axis": 1, "keepdims": 0}, differentiable=False),
        Case("TopK", (distinct(3, 6), ints(2)), lambda a: tuple(a.topk(2, -1)), outputs=2),
    ]
    return rows


CASES = [*_reductions()]
