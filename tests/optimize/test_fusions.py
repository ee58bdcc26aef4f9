"""Formulas that models write out become one operator, and only those."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from onnxtrain import ORTModule


class WrittenOut(torch.nn.Module):
    """Gelu's tanh approximation as GPT-2 writes it, with one of its constants to choose."""

    def __init__(self, cubic: float) -> None:
        super().__init__()
        self.linear, self.cubic = torch.nn.Linear(4, 6), cubic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        inner = math.sqrt(2.0 / math.pi) * (y + self.cubic * torch.pow(y, 3.0))
        return (0.5 * y * (1.0 + torch.tanh(inner))).sum()


@pytest.mark.parametrize(("cubic", "fused"), [(0.044715, True), (0.0447, False), (0.05, False)])
def test_tanh_gelu(cubic: float, fused: bool) -> None:
    eager = WrittenOut(cubic)
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(5, 4)
    for run in (wrapped, eager):
        run(x).backward()
    assert ("approximate='tanh'" in wrapped.graph("captured")) is fused
    assert ("test_fusions.py" in wrapped.graph("captured").split("approximate='tanh'")[-1]) is True
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad, rtol=1e-5, atol=1e-6)
