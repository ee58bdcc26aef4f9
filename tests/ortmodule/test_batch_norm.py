"""Batch normalization: layers that are called twice, means over all batches, several outputs."""

from __future__ import annotations

import pytest
import torch
from parity import captures, pair, same, same_step


class Twice(torch.nn.Module):
    """A siamese network: both inputs go through one layer."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(a)) - self.norm(self.linear(b))).square().mean()


class Once(Twice):
    """The loss is not the first scalar that is returned."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.linear(a + b))
        return h.detach().mean(), h.square().mean() + h.mean()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [Twice, Once])
def test_statistics_as_eager(kind: type[Twice], momentum: float | None) -> None:
    wrapped, eager = pair(kind(momentum))
    for step in range(3):
        same_step(wrapped, eager, torch.randn(3 + step, 4), torch.randn(3 + step, 4))
        same(dict(wrapped.named_buffers()), dict(eager.named_buffers()))
    assert captures(wrapped) == 1
    wrapped.eval()
    eager.eval()
    same_step(wrapped, eager, torch.randn(3, 4), torch.randn(3, 4))
