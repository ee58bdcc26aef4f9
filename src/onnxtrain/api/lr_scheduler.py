"""Learning-rate schedules: a factor of one rate for each step, kept in the checkpoint."""

from __future__ import annotations

import abc
import math
import warnings
from typing import Any

from onnxtrain.api.optimizer import Optimizer
from onnxtrain.errors import OptionError
from onnxtrain.number_ranges import check_number, check_whole

_SCHEDULE = "schedule"


class LRScheduler(abc.ABC):
    """Sets the optimizer's learning rate to ``initial_lr · factor(steps)``, at once and at each call of ``step``.

    A checkpoint with optimizer state remembers the schedule: made again with the same settings, it goes on.

    Args:
        optimizer: whose rate is set.
        initial_lr: the rate that factors are of.
        settings: what else decides the factors, to recognize the schedule by.
    """

    def __init__(self, optimizer: Optimizer, initial_lr: float, **settings: float) -> None:
        self._optimizer, self._initial_lr = optimizer, _rate("initial_lr", initial_lr)
        own: dict[str, Any] = {"kind": type(self).__name__, "initial_lr": initial_lr, **settings}
        before = optimizer.settings.get(_SCHEDULE)
        step = 0
        if before is not None:
            if {**before, "step": 0} == {**own, "step": 0}:
                step = before["step"]
            else:
                warnings.warn("the checkpoint has another schedule; this one begins at its start", stacklevel=3)
        self._record = own | {"step": step}
        optimizer.settings[_SCHEDULE] = self._record
        self._apply()

    @abc.abstractmethod
    def factor(self, step: int) -> float:
        """The factor after that many steps."""

    def step(self) -> None:
        """Set the rate of the next update."""
        self._record["step"] += 1
        self._apply()

    def _apply(self) -> None:
        self._optimizer.set_learning_rate(self._initial_lr * self.factor(self._record["step"]))


class _Warm(LRScheduler):
    """Schedules that rise from 0 in ``warmup_step_count`` steps and then fall until ``total_step_count``."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
        **settings: float,
    ) -> None:
        check_whole("warmup_step_count", warmup_step_count, error=OptionError)
        check_whole("total_step_count", total_step_count, error=OptionError)
        if not 0 <= warmup_step_count < total_step_count:
            what = f"a warm-up of {warmup_step_count} steps does not fit into {total_step_count} steps"
            raise OptionError(what, cure="choose 0 <= warmup_step_count < total_step_count")
        self._warmup, self._total = warmup_step_count, total_step_count
        super().__init__(optimizer, initial_lr, warmup=warmup_step_count, total=total_step_count, **settings)

    def factor(self, step: int) -> float:
        """The factor after that many steps."""
        if step < self._warmup:
            return step / self._warmup
        return self.fall(min(1.0, (step - self._warmup) / (self._total - self._warmup)))

    @abc.abstractmethod
    def fall(self, share: float) -> float:
        """The factor after that share of the steps that follow the warm-up."""


class LinearLRScheduler(_Warm):
    """From 0 up to ``initial_lr`` in ``warmup_step_count`` steps, then down to 0 at ``total_step_count``."""

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        super().__init__(optimizer, warmup_step_count, total_step_count, initial_lr)

    def fall(self, share: float) -> float:
        """The factor after that share of the fall."""
        return 1.0 - share


class CosineLRScheduler(_Warm):
    """A warm-up, then half a cosine from ``initial_lr`` down to ``min_lr`` (arXiv 1608.03983, one cycle)."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
        min_lr: float = 0.0,
    ) -> None:
        self._least = _rate("min_lr", min_lr) / _positive("initial_lr", initial_lr)
        super().__init__(optimizer, warmup_step_count, total_step_count, initial_lr, min_lr=min_lr)

    def fall(self, share: float) -> float:
        """The factor after that share of the fall."""
        return _cosine(1.0, self._least, share)


class PolynomialLRScheduler(_Warm):
    """A warm-up, then ``end_lr + (initial_lr - end_lr) · (1 - share)^power``."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
        power: float = 1.0,
        end_lr: float = 0.0,
    ) -> None:
        self._power = check_number("power", power, least=0, error=OptionError)
        self._end = _rate("end_lr", end_lr) / _positive("initial_lr", initial_lr)
        super().__init__(optimizer, warmup_step_count, total_step_count, initial_lr, power=power, end_lr=end_lr)

    def fall(self, share: float) -> float:
        """The factor after that share of the fall."""
        return self._end + (1.0 - self._end) * (1.0 - share) ** self._power


class ConstantLRScheduler(LRScheduler):
    """From 0 up to ``initial_lr`` in ``warmup_step_count`` steps, then constant."""

    def __init__(self, optimizer: Optimizer, initial_lr: float, warmup_step_count: int = 0) -> None:
        self._warmup = check_whole("warmup_step_count", warmup_step_count, least=0, error=OptionError)
        super().__init__(optimizer, initial_lr, warmup=warmup_step_count)

    def factor(self, step: int) -> float:
        """The factor after that many steps."""
        return min(1.0, step / self._warmup) if self._warmup else 1.0


class OneCycleLRScheduler(LRScheduler):
    """Half a cosine from ``max_lr / div_factor`` up to ``max_lr``, then another down to far below the first rate.

    The formula of torch.optim.lr_scheduler.OneCycleLR with cosine annealing (arXiv 1708.07120).

    Args:
        optimizer: whose rate is set.
        max_lr: the highest rate.
        total_step_count: steps of the cycle, 2 at least.
        pct_start: share of them on the way up.
        div_factor: ``max_lr`` divided by the first rate.
        final_div_factor: the first rate divided by the last.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float,
        total_step_count: int,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:
        check_whole("total_step_count", total_step_count, error=OptionError)
        check_number("pct_start", pct_start, error=OptionError)
        if total_step_count < 2 or not 0 < pct_start < 1:
            what = f"a cycle of {total_step_count} steps with pct_start={pct_start} has no way up and down"
            raise OptionError(what, cure="choose total_step_count >= 2 and 0 < pct_start < 1")
        self._top, self._last = max(pct_start * total_step_count - 1, 1e-9), total_step_count - 1
        self._first = 1 / _positive("div_factor", div_factor)
        self._final = self._first / _positive("final_div_factor", final_div_factor)
        settings = {"total": total_step_count, "pct_start": pct_start, "div": div_factor, "final_div": final_div_factor}
        super().__init__(optimizer, max_lr, **settings)

    def factor(self, step: int) -> float:
        """The factor after that many steps."""
        step = min(step, self._last)
        if step <= self._top:
            return _cosine(self._first, 1.0, step / self._top)
        return _cosine(1.0, self._final, (step - self._top) / (self._last - self._top))


def _rate(name: str, given: float) -> float:
    return check_number(name, given, least=0, error=OptionError)


def _positive(name: str, given: float) -> float:
    return check_number(name, given, above=0, error=OptionError)


def _cosine(start: float, end: float, share: float) -> float:
    """Half a cosine from start to end."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))
