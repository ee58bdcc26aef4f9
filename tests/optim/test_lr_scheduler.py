"""Schedules with a warm-up: the rates of Transformers' schedules of the same name, and states that go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch.optim.lr_scheduler import LRScheduler

from onnxtrain.errors import OptimizerError
from onnxtrain.optim import FusedAdam
from onnxtrain.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)

TOTAL, RISING = 40, 10
OURS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "constant_with_warmup": lambda o: ConstantWarmupLRScheduler(o, TOTAL, warmup=RISING / TOTAL),
    "linear": lambda o: LinearWarmupLRScheduler(o, TOTAL, warmup=RISING / TOTAL),
    "cosine": lambda o: CosineWarmupLRScheduler(o, TOTAL, warmup=RISING / TOTAL),
    "polynomial": lambda o: PolyWarmupLRScheduler(o, TOTAL, lr_end=1e-4, degree=2.0, warmup=RISING / TOTAL),
}


def optimizer_of() -> torch.optim.Optimizer:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    return FusedAdam([{"params": [first]}, {"params": [second], "lr": 0.02}], lr=0.01)


def rates(schedule: LRScheduler, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr())
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", OURS)
def test_the_rates_are_those_of_transformers(name):
    """To the last step, after which ours stay; of the power the first group, whose rate is that of all there."""
    more = {"lr_end": 1e-4, "power": 2.0} if name == "polynomial" else None
    theirs = transformers.get_scheduler(name, optimizer_of(), RISING, TOTAL, scheduler_specific_kwargs=more)
    got, wanted = rates(OURS[name](optimizer_of()), TOTAL + 1), rates(theirs, TOTAL + 1)
    groups = 1 if name == "polynomial" else 2
    assert torch.allclose(torch.tensor(got)[:, :groups], torch.tensor(wanted)[:, :groups], atol=1e-9)


@pytest.mark.parametrize("name", OURS)
def test_a_saved_schedule_goes_on(name):
    whole, part = OURS[name](optimizer_of()), OURS[name](optimizer_of())
    wanted = rates(whole, 20)[12:]
    rates(part, 12)
    again = OURS[name](optimizer_of())
    again.optimizer.load_state_dict(part.optimizer.state_dict())
    again.load_state_dict(part.state_dict())
    assert rates(again, 8) == wanted


@pytest.mark.parametrize(("total", "warmup"), [(0, 0.1), (10, -0.1), (10, 1.1)])
def test_numbers_out_of_range_are_refused(total, warmup):
    with pytest.raises(OptimizerError, match="out of range"):
        LinearWarmupLRScheduler(optimizer_of(), total, warmup=warmup)
