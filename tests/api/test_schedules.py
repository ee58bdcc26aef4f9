"""Learning-rate schedules against those of torch, their order of arguments, and what a checkpoint keeps of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onnxtrain import api
from onnxtrain.api.optimizer import Optimizer
from onnxtrain.errors import OptionError

STEPS = 40


class Rate:
    """What a schedule sees of an optimizer: a rate, and settings that a checkpoint keeps."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings: dict[str, Any] = {} if settings is None else settings
        self.rate = 0.0

    def set_learning_rate(self, rate: float) -> None:
        self.rate = rate


def rates(kind: type[api.LRScheduler], *given: Any, **options: Any) -> list[float]:
    optimizer = Rate()
    schedule = kind(optimizer, *given, **options)  # type: ignore[arg-type]
    found = []
    for _ in range(STEPS + 5):
        found.append(optimizer.rate)
        schedule.step()
    return found


def of_torch(make, initial: float, warmup: int = 0) -> list[float]:
    """Rates of a schedule of torch, which begins after a linear warm-up."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=initial)
    schedule = make(optimizer)
    found = [initial * step / warmup for step in range(warmup)]
    while len(found) < STEPS:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_are_those_of_torch(warmup: int) -> None:
    fall = STEPS - warmup
    schedules = torch.optim.lr_scheduler
    cases = [
        (
            rates(api.LinearLRScheduler, warmup, STEPS, 0.5),
            of_torch(lambda o: schedules.LinearLR(o, 1.0, 1e-30, fall), 0.5, warmup),
        ),
        (
            rates(api.CosineLRScheduler, warmup, STEPS, 0.5, min_lr=0.05),
            of_torch(lambda o: schedules.CosineAnnealingLR(o, fall, 0.05), 0.5, warmup),
        ),
        (
            rates(api.PolynomialLRScheduler, warmup, STEPS, 0.5, power=2.0),
            of_torch(lambda o: schedules.PolynomialLR(o, fall, 2.0), 0.5, warmup),
        ),
        (
            rates(api.ConstantLRScheduler, 0.5, warmup),
            of_torch(lambda o: schedules.ConstantLR(o, 1.0), 0.5, warmup),
        ),
    ]
    for ours, theirs in cases:
        assert ours[:STEPS] == pytest.approx(theirs, rel=1e-6, abs=1e-12)
        assert ours[0] == (0.0 if warmup else 0.5)


@pytest.mark.parametrize("share", [0.3, 0.05, 0.9])
def test_one_cycle_is_that_of_torch(share: float) -> None:
    options = {"pct_start": share, "div_factor": 10.0, "final_div_factor": 100.0}
    ours = rates(api.OneCycleLRScheduler, 0.5, STEPS, **options)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, STEPS, **options)  # type: ignore[arg-type]
    theirs = []
    for index in range(STEPS):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if index < STEPS - 1:
            schedule.step()
    assert ours[:STEPS] == pytest.approx(theirs, rel=1e-6)


def test_warm_up_comes_before_the_total() -> None:
    """``LinearLRScheduler(optimizer, warmup, total, rate)``: highest after the warm-up, zero at the total."""
    found = rates(api.LinearLRScheduler, 10, STEPS, 1.0)
    assert found.index(max(found)) == 10 and found[10] == 1.0 and found[25] == 0.5
    assert found[STEPS:] == [0.0] * 5


def test_a_schedule_goes_on_where_it_was() -> None:
    settings: dict[str, Any] = {}
    schedule = api.CosineLRScheduler(Rate(settings), 2, STEPS, 0.5)  # type: ignore[arg-type]
    for _ in range(9):
        schedule.step()
    again = Rate(settings)
    api.CosineLRScheduler(again, 2, STEPS, 0.5)  # type: ignore[arg-type]
    assert again.rate == rates(api.CosineLRScheduler, 2, STEPS, 0.5)[9]
    other = Rate(settings)
    with pytest.warns(UserWarning, match="another schedule"):
        api.CosineLRScheduler(other, 3, STEPS, 0.5)  # type: ignore[arg-type]
    assert other.rate == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda o: api.LinearLRScheduler(o, 10, 10, 0.1),
        lambda o: api.LinearLRScheduler(o, 100, 10, 0.1),
        lambda o: api.CosineLRScheduler(o, -1, 10, 0.1),
        lambda o: api.OneCycleLRScheduler(o, 0.1, 1),
        lambda o: api.OneCycleLRScheduler(o, 0.1, 10, pct_start=1.0),
    ],
)
def test_schedules_that_do_not_fit_are_errors(make) -> None:
    with pytest.raises(OptionError, match=r"does not fit|no way up and down"):
        make(Rate())


def test_what_stands_for_an_optimizer_is_like_one() -> None:
    assert hasattr(Optimizer, "set_learning_rate") and isinstance(Optimizer.settings, property)
