"""Largest and smallest elements, and truth of all and any: where elements tie, and where there are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity import captures, pair, same_step

Tensor = torch.Tensor
TIED = {
    "max": lambda x: x.max(1).values,
    "min kept": lambda x: x.min(-1, keepdim=True).values,
    "max of all": lambda x: x.max(),
    "amax": lambda x: x.amax(1),
    "amin of two": lambda x: x.amin((0, 1)),
    "max with its places": lambda x: x.max(0)[0] * (1 + x.max(0)[1]),
    "of a number": lambda x: x.sum().max(0).values,
    "median": lambda x: x.median(1).values,
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
}
EMPTY = {
    "all": lambda x: x.sum() + (x > 9).all(),
    "any": lambda x: x.sum() + (x > 9).any(),
    "all of an axis": lambda x: x.sum() + (x > 9).all(1).sum(),
    "any kept": lambda x: x.sum() + (x > 9).any(-1, keepdim=True).sum(),
    "amax of another axis": lambda x: x.amax(-1),
}


class Applied(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self._function = torch.nn.Parameter(torch.ones(1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x * self.weight)


@pytest.mark.parametrize("name", TIED)
def test_ties_have_the_gradient_of_eager(name: str) -> None:
    x = torch.tensor([[1.0, 3, 3, 2], [2, 2, 1, 1], [3, 3, 3, 3]], requires_grad=True)
    same_step(*pair(Applied(TIED[name])), x)


@pytest.mark.parametrize("name", EMPTY)
def test_reductions_of_nothing(name: str) -> None:
    wrapped, eager = pair(Applied(EMPTY[name]))
    for length in (3, 0, 2):
        same_step(wrapped, eager, torch.randn(2, length, 4))
    assert captures(wrapped) <= 2
