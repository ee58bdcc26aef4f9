"""Operators that move data."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from op_cases.case import Case, ints, x


def _shape() -> list[Case]:
    return [
        Case("Reshape", (x(2, 3, 4), ints(0, -1)), lambda a: a.reshape(2, 12)),
        Case("Reshape", (x(2, 12), ints(2, 3, -1)), lambda a: a.reshape(2, 3, 4), label="split"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.flatten(1)),
        Case("Transpose", (x(2, 3, 4),), lambda a: a.permute(1, 2, 0), {"perm": [1, 2, 0]}),
        Case("Transpose", (x(2, 3),), lambda a: a.T, label="default"),
        Case("Squeeze", (x(2, 1, 4, 1), ints(1, -1)), lambda a: a.reshape(2, 4)),
        Case("Unsqueeze", (x(2, 4), ints(0, -1)), lambda a: a.reshape(1, 2, 4, 1)),
        Case("Expand", (x(3, 1), ints(2, 3, 4)), lambda a: a.expand(2, 3, 4)),
        Case("Tile", (x(2, 3), ints(2, 3)), lambda a: a.repeat(2, 3)),
        Case("Concat", (x(2, 3), x(2, 5)), lambda a, b: torch.cat((a, b), 1), {"axis": 1}),
        Case("Concat", (x(2, 3), x(4, 3), x(5, 3)), lambda *a: torch.cat(a, 0), {"axis": -2}, label="three"),
        Case("Split", (x(2, 6), ints(2, 4)), lambda a: a.split((2, 4), 1), {"axis": 1}, outputs=2),
        Case("Split", (x(7, 2),), lambda a: a.split((3, 3, 1), 0), {"num_outputs": 3}, outputs=3, label="uneven", static=(0,)),
        Case("Split", (x(6, 2),), lambda a: a.split(2, 0), outputs=3, label="opset13", static=(0,), opset=13),
        Case("Slice", (x(5, 6), ints(1), ints(4), ints(1)), lambda a: a[:, 1:4]),
        Case("Slice", (x(5, 6), ints(0, 2), ints(9, 5), ints(0, 1)), lambda a: a[:, 2:5], label="two"),
        Case("Slice", (x(5, 6), ints(-4), ints(-1), ints(0)), lambda a: a[-4:-1], label="negative"),
        Case("Slice", (x(5, 6), ints(1), ints(6), ints(1), ints(2)), lambda a: a[:, 1:6:2], label="steps"),
        Case("Slice", (x(5, 6), ints(4), ints(-9), ints(0), ints(-1)), lambda a: a.flip(0), label="reverse"),
        Case("Pad", (x(2, 3), ints(1, 0, 2, 1), np.array(0.5)), lambda a: F.pad(a, (0, 1, 1, 2), value=0.5)),
        Case("Pad", (x(4, 5), ints(-1, 0, 0, 2)), lambda a: F.pad(a, (0, 2, -1, 0)), label="cut"),
        Case("Trilu", (x(4, 5),), torch.triu),
        Case("Trilu", (x(4, 5), np.array(1)), lambda a: a.tril(1), {"upper": 0}, label="lower"),
        Case("Shape", (x(3, 4),), lambda a: torch.tensor(a.shape), differentiable=False),
        Case("Size", (x(3, 4),), lambda a: torch.tensor(a.numel()), differentiable=False),
    ]  # fmt: skip


CASES = [*_shape()]
