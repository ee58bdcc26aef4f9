"""Rows without padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, exactly, flag, index, ints, x


def _placed(a: Tensor, rows: Tensor, *sizes: int) -> Tensor:
    """Rows of a in zeros."""
    zeros = torch.zeros(int(np.prod(sizes)), *a.shape[1:], dtype=a.dtype)
    return zeros.index_copy(0, rows, a).reshape(*sizes, *a.shape[1:])


def _gathering() -> list[Case]:
    def take(*rows: int) -> Callable[..., Tensor]:
        return lambda a: a[torch.tensor(rows, dtype=torch.int64)]

    rows = exactly(ints(0, 2, 3))
    return [
        Case("ShrunkenGather", (x(5, 3), rows), lambda a, i: a[i], domain=DOMAIN),
        Case("ShrunkenGather", (x(4), ints(1, 3)), take(1, 3), domain=DOMAIN, label="numbers"),
        Case("ShrunkenGather", (x(5, 3, 2), ints()), take(), domain=DOMAIN, label="none"),
        Case("ShrunkenGather", (x(3, 2), ints(0, 1, 2)), take(0, 1, 2), domain=DOMAIN, label="all"),
        Case(
            "ShrunkenGather", (index(5, 3, high=9), rows), lambda a, i: a[i], domain=DOMAIN, label="int64",
            differentiable=False,
        ),
    ]  # fmt: skip


def _padding() -> list[Case]:
    def take(*rows: int) -> Callable[..., Tensor]:
        return lambda a: a.flatten(0, 1)[torch.tensor(rows, dtype=torch.int64)]

    def put(*rows: int, sizes: tuple[int, int]) -> Callable[..., Tensor]:
        return lambda a: _placed(a, torch.tensor(rows, dtype=torch.int64), *sizes)

    rows = exactly(ints(0, 4, 5))
    return [
        Case(
            "FlattenAndUnpad", (x(2, 3, 4, 5), ints(0, 4, 5)), lambda a: (take(0, 4, 5)(a), torch.tensor([2, 3])),
            domain=DOMAIN, outputs=2,
        ),
        Case("FlattenAndUnpad", (x(2, 3, 4), rows), lambda a, i: a.flatten(0, 1)[i], domain=DOMAIN, label="input"),
        Case("FlattenAndUnpad", (x(2, 3), ints(1, 3)), take(1, 3), domain=DOMAIN, label="numbers"),
        Case("FlattenAndUnpad", (x(2, 3, 4), ints()), take(), domain=DOMAIN, label="none"),
        Case("FlattenAndUnpad", (x(2, 3, 4), ints(*range(6))), take(*range(6)), domain=DOMAIN, label="all"),
        *(
            Case(
                "FlattenAndUnpad", (given, rows), lambda a, i: a.flatten(0, 1)[i], domain=DOMAIN, label=label,
                differentiable=False,
            )
            for label, given in (("int64", index(2, 3, high=9)), ("bool", flag(2, 3, 4)))
        ),
        Case("PadAndUnflatten", (x(3, 4, 5), ints(4, 0, 5), ints(2, 3)), put(4, 0, 5, sizes=(2, 3)), domain=DOMAIN),
        Case(
            "PadAndUnflatten", (x(3, 4), rows, exactly(ints(2, 3))), lambda a, i, _: _placed(a, i, 2, 3), domain=DOMAIN,
            label="input",
        ),
        Case("PadAndUnflatten", (x(2), ints(1, 3), ints(2, 2)), put(1, 3, sizes=(2, 2)), domain=DOMAIN, label="numbers"),
        Case("PadAndUnflatten", (x(0, 4), ints(), ints(2, 3)), put(sizes=(2, 3)), domain=DOMAIN, label="none"),
        Case(
            "PadAndUnflatten", (x(6, 4), ints(*range(6)), ints(2, 3)), put(*range(6), sizes=(2, 3)), domain=DOMAIN,
            label="all",
        ),
        *(
            Case(
                "PadAndUnflatten", (given, rows, ints(2, 3)), lambda a, i: _placed(a, i, 2, 3), domain=DOMAIN,
                label=label, differentiable=False,
            )
            for label, given in (("int64", index(3, 4, high=9)), ("bool", flag(3, 4)))
        ),
    ]  # fmt: skip


CASES = [*_gathering(), *_padding()]
