"""Within a budget: of all choices those that take the least time, and none that would draw other random numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from benchmarks.order import plan_of
from onnxtrain import Options
from onnxtrain.engine.budget import Fit
from onnxtrain.errors import GraphError
from onnxtrain.plan.cheapest import cheapest
from onnxtrain.plan.copies import recomputed
from onnxtrain.plan.recompute import Choice, Search
from onnxtrain.plan.timeline import changes, peaks


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


def every_choice(model: nn.Module) -> tuple[Fit, Mapping[str, int], list[Choice]]:
    fit, sizes = fit_of(model)
    assert fit.base.training is not None
    return fit, sizes, [*Search(fit.base.training, fit.base.plan, sizes, "cpu").run()]


def test_what_takes_the_least_time_of_all_sets_of_choices_is_taken() -> None:
    """Beside every set that there is, for limits that fall: none within the limit is faster, and no peak rises."""
    fit, sizes, every = every_choice(Chain())
    training, plan = fit.base.training, fit.base.plan
    assert training is not None and 5 < len(every) < 14
    before, added = changes(training, plan, sizes, every)
    sets = [[i for i in range(len(every)) if places >> i & 1] for places in range(2 ** len(every))]
    told = [(_seconds([every[i] for i in chosen]), int((before + added[chosen].sum(0)).max())) for chosen in sets]
    curve = peaks(*changes(training, plan, sizes, every))
    most = math.inf
    for limit in range(curve[0] - 1, min(curve) - 1, -(curve[0] - min(curve)) // 15):
        found = cheapest(every, before, added, limit)
        assert found is not None
        peak = peaks(*changes(training, plan, sizes, found))[-1]
        assert peak <= min(limit, most)
        assert _seconds(found) == pytest.approx(min(seconds for seconds, peak in told if peak <= limit), rel=1e-3)
        most = peak


def test_it_is_faster_than_one_choice_after_the_other() -> None:
    fit, sizes, every = every_choice(Chain())
    training, plan = fit.base.training, fit.base.plan
    assert training is not None
    curve, gained = peaks(*changes(training, plan, sizes, every)), 0
    for limit in range(curve[0] - 1, min(curve) - 1, -(curve[0] - min(curve)) // 15):
        found = cheapest(every, *changes(training, plan, sizes, every), limit)
        greedy = every[: next(n for n, peak in enumerate(curve) if peak <= limit)]
        assert found is not None and _seconds(found) <= _seconds(greedy) * 1.001
        gained += _seconds(found) < 0.95 * _seconds(greedy)
    assert gained


def test_a_limit_below_all_choices_has_none() -> None:
    fit, sizes, every = every_choice(Chain())
    training, plan = fit.base.training, fit.base.plan
    assert training is not None
    told = changes(training, plan, sizes, every)
    assert cheapest(every, *told, min(peaks(*changes(training, plan, sizes, every))) // 2) is None
    assert cheapest([], told[0], told[1][:0], 1) is None


def _seconds(chosen: Sequence[Choice]) -> float:
    """As they are counted: operators that run again take time to be called, too."""
    return sum(c.seconds + 5e-6 * len(c.nodes) for c in chosen)


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
