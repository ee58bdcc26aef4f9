"""Axes, ties and element types of reductions, Softmax and running sums."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from op_table import Case, distinct, index, ints, positive, ties, x

NOOP = {"noop_with_empty_axes": 1}


def _noop() -> list[Case]:
    """Over no axes nothing is summed, but what a composite reduction does to each element is done (ONNX, opset 18)."""
    functions = {
        "ReduceSum": torch.clone, "ReduceMean": torch.clone, "ReduceMax": torch.clone, "ReduceL1": torch.abs,
        "ReduceL2": torch.abs, "ReduceSumSquare": torch.square, "ReduceLogSumExp": torch.clone,
    }  # fmt: skip
    return [Case(op, (distinct(3, 4),), f, NOOP, label="noop") for op, f in functions.items()]


def _axes() -> list[Case]:
    rows = [
        Case("ReduceSum", (x(3, 4), ints()), lambda a: a.sum().reshape(1, 1), label="empty-axes"),
        Case("ReduceSum", (x(),), lambda a: a + 0, {"keepdims": 0}, label="scalar"),
        Case("ReduceMean", (x(2, 3, 4), ints(-1, 0)), lambda a: a.mean((0, 2)), {"keepdims": 0}, label="unordered"),
        Case("ReduceMean", (x(2, 3, 4), ints(-2)), lambda a: a.mean(1), {"keepdims": 0}, label="negative"),
        Case("ReduceMax", (ties(4, 10), ints(1)), lambda a: a.amax(1, True), label="ties"),
        Case("ReduceMax", (ties(4, 10),), lambda a: a.amax((0, 1)), {"keepdims": 0}, label="ties-all"),
        Case("ReduceMin", (ties(4, 10), ints(0)), lambda a: a.amin(0), {"keepdims": 0}, label="ties"),
        Case("ReduceL1", (ties(4, 10), ints(1)), lambda a: a.abs().sum(1, True), label="ties"),
        Case("ReduceLogSumExp", (x(3, 4, low=-900.0, high=900.0), ints(1)), lambda a: a.logsumexp(1, True),
             label="wide"),
        Case("ReduceProd", (positive(3, 4), ints(1)), lambda a: a.prod(1, True), differentiable=False, missing=True),
        Case("ReduceProd", (index(3, 4, low=1, high=4),), lambda a: a.prod(), {"keepdims": 0}, label="integers",
             differentiable=False),
        Case("ReduceLogSum", (positive(3, 4), ints(1)), lambda a: a.sum(1, True).log(), differentiable=False,
             missing=True),
    ]  # fmt: skip
    functions = {"ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin}
    rows += [
        Case(op, (index(3, 4, low=-9, high=9), ints(1)), lambda a, f=f: f(a, 1, True), label="integers",
             differentiable=False)
        for op, f in functions.items()
    ]  # fmt: skip
    return rows


def _along_an_axis() -> list[Case]:
    return [
        Case("Softmax", (x(5),), lambda a: F.softmax(a, 0), label="vector"),
        Case("Softmax", (x(3, 4, low=-200.0, high=200.0),), lambda a: F.softmax(a, -1), label="wide"),
        Case("Softmax", (x(3, 4, 5),), lambda a: F.softmax(a, 0), {"axis": 0}, label="axis0"),
        Case("LogSoftmax", (x(3, 4, low=-200.0, high=200.0),), lambda a: F.log_softmax(a, -1), label="wide"),
        Case("LogSoftmax", (x(3, 4),), lambda a: F.log_softmax(a, 0), {"axis": -2}, label="axis-2"),
        Case("CumSum", (x(3, 4), np.array(-1)), lambda a: a.cumsum(1) - a, {"exclusive": 1}, label="exclusive"),
        Case("CumSum", (x(3, 4), np.array(1)), lambda a: a.flip(1).cumsum(1).flip(1) - a,
             {"exclusive": 1, "reverse": 1}, label="both"),
        Case("CumSum", (index(3, 4, high=9), ints(1)), lambda a: a.cumsum(1), label="integers", differentiable=False),
        Case("TopK", (distinct(3, 6), ints(2)), lambda a: tuple(a.topk(2, -1, largest=False)), {"largest": 0},
             outputs=2, label="smallest"),
        Case("TopK", (distinct(6, 3), ints(4)), lambda a: tuple(a.topk(4, 0)), {"axis": 0}, outputs=2, label="axis0"),
        Case("ArgMax", (ties(3, 10),), lambda a: a.argmax(1, True), {"axis": -1}, label="ties", differentiable=False),
        Case("ArgMax", (ties(3, 10),), lambda a: a.shape[1] - 1 - a.flip(1).argmax(1),
             {"axis": 1, "keepdims": 0, "select_last_index": 1}, label="last", differentiable=False),
        Case("ArgMin", (ties(3, 10),), lambda a: a.argmin(0, True), label="ties", differentiable=False),
    ]  # fmt: skip


ROWS = [*_noop(), *_axes(), *_along_an_axis()]
