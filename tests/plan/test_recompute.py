"""Within a budget: no choice that it does not need, and none that would draw other random numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from benchmarks.order import plan_of
from onnxtrain import Options
from onnxtrain.engine.budget import Fit
from onnxtrain.errors import GraphError
from onnxtrain.plan.copies import recomputed
from onnxtrain.plan.recompute import Choice, Search
from onnxtrain.plan.timeline import peaks, spared


class Chain(nn.Module):
    """Products and cheap operators, whose values are of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (16, 64, 24, 96, 16)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
        return x.square().mean()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return (y * torch.bernoulli(torch.full_like(y, 0.5))).exp().mean()


def fit_of(model: nn.Module) -> tuple[Fit, Mapping[str, int]]:
    planned = plan_of(model, {"x": torch.randn(32, 16)}, Options(summary=False))
    return planned.fit, planned.sizes


def test_no_choice_is_taken_that_a_limit_does_not_need() -> None:
    fit, sizes = fit_of(Chain())
    training, plan = fit.base.training, fit.base.plan
    assert training is not None
    every = [*Search(training, plan, sizes, "cpu").run()]
    curve = peaks(training, plan, sizes, every)
    most, spare = max(curve), 0
    for limit in range(curve[0], min(curve), -(curve[0] - min(curve)) // 15):
        count = next(n for n, peak in enumerate(curve) if peak <= limit)
        kept = spared(training, plan, sizes, every[:count], limit)
        peak = peaks(training, plan, sizes, kept)[-1]
        assert peak <= min(limit, most)
        for one in kept:
            others = [c for c in kept if c is not one]
            assert peaks(training, plan, sizes, others)[-1] > limit
        most, spare = peak, spare + count - len(kept)
    assert spare and most < math.inf


def test_what_draws_random_numbers_never_runs_again() -> None:
    fit, _ = fit_of(Drawing())
    training, plan = fit.base.training, fit.base.plan
    assert training is not None
    drawn = next(v for n in training.model.graph if n.op_type == "ATen" for v in n.outputs)
    reader = next(use.node for use in drawn.uses() if use.node.outputs[0].uses()).outputs[0]
    lost = Choice((str(drawn.name), str(reader.name)), (), (reader,), 0, 1, 1.0)
    with pytest.raises(GraphError, match="gives something else when it runs again") as caught:
        recomputed(training, plan, [lost])
    assert "ATen" in caught.value.node
