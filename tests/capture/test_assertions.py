"""Checks that would only raise: looks like others in an ORTModule, left out where a graph is made alone."""

from __future__ import annotations

import pytest
import torch
from parity import captures, pair, same_step

from onnxtrain.capture import capture
from onnxtrain.errors import CaptureError


class Checked(torch.nn.Module):
    """Looks at its input in all ways that only raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is not None and labels.max() >= 2:
            raise ValueError("too large")
        assert not torch.isnan(x).any(), "not a number"
        assert torch.all(x < 60).item()
        if (labels is not None and labels.max().item() > len(x)) or not x.sum().item() < 1e9:
            raise ValueError("too many")
        assert (x < 50).all() and not (x.abs() > 1e9).any()
        if not torch.isfinite(x).all():
            place = "here"
            raise RuntimeError(place)
        return self.linear(x).square().sum()


class Branching(Checked):
    """Computes another thing where a tensor says so, or raises where it does not."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if (x > 0).any():
            x = x * 2
        else:
            raise ValueError("negative")
        return self.linear(x).sum()


def test_checks_raise_when_eager_does() -> None:
    wrapped, eager = pair(Checked().double())
    for rows in (2, 4):
        same_step(wrapped, eager, torch.randn(rows, 3, dtype=torch.float64), torch.tensor([0, 1]))
    x = torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="too large"):
        wrapped(x, torch.tensor([0, 2]))
    with pytest.raises(AssertionError, match="not a number"):
        wrapped(x.log(), torch.tensor([0, 1]))
    same_step(wrapped, eager, x, torch.tensor([0, 0]))
    assert captures(wrapped) == 1


def test_checks_are_left_out_of_a_graph_alone(caplog: pytest.LogCaptureFixture) -> None:
    graph = capture(Checked(), (torch.randn(2, 3), torch.tensor([0, 1])), {}).graph
    assert len(graph.signature.outputs) == 1
    told = [r.getMessage() for r in caplog.records if "looks into a tensor" in r.getMessage()]
    assert len(told) == len(set(told)) >= 4 and all("test_assertions.py:" in line for line in told)


def test_branches_that_compute_are_refused_in_a_graph_alone() -> None:
    with pytest.raises(CaptureError, match="depends on the content of a tensor"):
        capture(Branching(), (torch.rand(2, 3),), {})
