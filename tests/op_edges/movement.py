"""Shapes, negative axes and default operands of operators that move elements."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from op_table import Case, Tensor, index, ints, x

from onnxtrain.ir.graphs import DOMAIN

LARGEST = 2**63 - 1


def _shapes() -> list[Case]:
    return [
        Case("Reshape", (x(2, 3, 4), ints(0, 0, -1, 1)), lambda a: a[..., None], label="zeros"),
        Case("Reshape", (x(1, 1), ints()), lambda a: a.reshape(()), label="scalar"),
        Case("Reshape", (index(2, 6, high=9), ints(-1)), lambda a: a.flatten(), label="integers", differentiable=False),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.reshape(1, -1), {"axis": 0}, label="axis0"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.flatten(0, 1), {"axis": -1}, label="negative"),
        Case("Squeeze", (x(1, 3, 1),), lambda a: a.squeeze(), label="all"),
        Case("Unsqueeze", (x(), ints(0, 1)), lambda a: a.reshape(1, 1), label="scalar"),
        Case("Unsqueeze", (x(3, 4), ints(2, 0)), lambda a: a[None, :, None], label="unordered"),
        Case("Transpose", (x(2, 3, 4, 5),), lambda a: a.permute(0, 2, 1, 3), {"perm": [0, 2, 1, 3]}, label="heads"),
        Case("Expand", (x(), ints(2, 3)), lambda a: a.expand(2, 3), label="scalar"),
        Case("Expand", (x(3, 4), ints(2, 1, 1)), lambda a: a.expand(2, -1, -1), label="ones"),
        Case("Expand", (x(2, 3, 4), ints(4)), lambda a: a + 0, label="shorter", static=(0,)),
        Case("Tile", (x(2, 3, 4), ints(1, 3, 1)), lambda a: a.repeat(1, 3, 1), label="middle"),
        Case("Tile", (x(3), ints(1)), lambda a: a + 0, label="once"),
        Case("SumToShape", (x(2, 3, 4), ints(3, 1)), lambda a: a.sum((0, 2)).reshape(3, 1), domain=DOMAIN,
             static=(0,), differentiable=False, missing=True),
        Case("Shape", (x(3, 4, 5),), lambda a: torch.tensor(a.shape[1:]), {"start": -2}, label="part",
             differentiable=False),
        Case("ConstantOfShape", (ints(2, 3),), lambda: torch.zeros(2, 3, dtype=torch.float32), differentiable=False),
        Case("ConstantOfShape", (ints(4),), lambda: torch.full((4,), 7), {"value": np.array([7])}, label="integer",
             differentiable=False),
        Case("Range", (np.array(2), np.array(9), np.array(3)), lambda: torch.arange(2, 9, 3), differentiable=False),
        Case("Range", (np.array(5), np.array(0), np.array(-2)), lambda: torch.arange(5, 0, -2), label="down",
             differentiable=False),
        Case("Range", (np.float32(0), np.float32(1), np.float32(0.25)),
             lambda: torch.arange(0, 1, 0.25, dtype=torch.float32), label="real", differentiable=False),
    ]  # fmt: skip


def _parts() -> list[Case]:
    def middle(a: Tensor) -> Tensor:
        return a[:, 1:-1]

    return [
        Case("Concat", (x(2, 3),), lambda a: a + 0, {"axis": 0}, label="one"),
        Case("Concat", (x(2, 3, 4), x(2, 3, 1)), lambda a, b: torch.cat((a, b), -1), {"axis": -1}, label="last"),
        Case("Concat", (index(2, 3, high=5), index(4, 3, high=5)), lambda a, b: torch.cat((a, b)), {"axis": 0},
             label="integers", differentiable=False),
        Case("Split", (x(2, 3, 6), ints(1, 2, 3)), lambda a: a.split((1, 2, 3), -1), {"axis": -1}, outputs=3,
             label="last"),
        Case("Split", (x(2, 6),), lambda a: a.chunk(2, 1), {"axis": 1, "num_outputs": 2}, outputs=2, label="even",
             static=(0,)),
        Case("Slice", (x(5, 6), ints(1, 2), ints(4, 5)), lambda a: a[1:4, 2:5], label="all-axes"),
        Case("Slice", (x(5, 6), ints(1), ints(-1), ints(-1)), middle, label="last-axis"),
        Case("Slice", (x(5, 6), ints(2), ints(LARGEST), ints(0)), lambda a: a[2:], label="open"),
        Case("Slice", (x(5, 6), ints(-1), ints(LARGEST), ints(1)), lambda a: a[:, -1:], label="final"),
        Case("Slice", (x(5, 6), ints(-9), ints(2), ints(0)), lambda a: a[:2], label="before"),
        Case("Slice", (x(7, 3), ints(-2), ints(-LARGEST), ints(0), ints(-2)), lambda a: a[:-1].flip(0)[::2],
             label="reverse-steps"),
        Case("Slice", (x(5, 6), ints(0, 1), ints(5, 6), ints(0, 1), ints(1, 3)), lambda a: a[:5, 1:6:3],
             label="mixed-steps"),
        Case("Slice", (index(5, 6, high=9), ints(1), ints(3), ints(1)), lambda a: a[:, 1:3], label="integers",
             differentiable=False),
        Case("Pad", (x(2, 3, 4), ints(1, 2), np.array(0.0), ints(-1)), lambda a: F.pad(a, (1, 2)), label="axes"),
        Case("Pad", (x(2, 3), ints(0, 1, 0, 1)), lambda a: F.pad(a, (1, 1)), label="default"),
        Case("Pad", (x(1, 3, 5), ints(0, 0, 2, 0, 0, 2)), lambda a: F.pad(a, (2, 2), "reflect"),
             {"mode": "reflect"}, label="reflect", differentiable=False, missing=True),
        Case("Pad", (x(2, 3, 5), ints(0, 0, 1, 0, 0, 2)), lambda a: F.pad(a, (1, 2), "replicate"), {"mode": "edge"},
             label="edge", differentiable=False, missing=True),
        Case("Trilu", (x(2, 4, 4), np.array(-1)), lambda a: a.triu(-1), label="batch"),
        Case("Trilu", (x(5, 4), np.array(-2)), lambda a: a.tril(-2), {"upper": 0}, label="negative"),
        Case("Trilu", (index(4, 4, high=2), np.array(0)), lambda a: a.tril(), {"upper": 0}, label="integers",
             differentiable=False),
    ]  # fmt: skip


ROWS = [*_shapes(), *_parts()]
