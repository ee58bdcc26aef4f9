"""Learning rates that rise from zero over the first steps and then stay, or fall along a line, a cosine or a power.

With ``s`` the steps done, ``w = warmup * total_steps`` and ``u = (s - w) / (total_steps - w)``, at most 1, the rate is
``base * s / w`` while ``s < w``, and then what each class says.
"""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler

from onnxtrain.errors import OptimizerError


class _WarmupLRScheduler(LRScheduler):
    """A rate that rises to an optimizer's own.

    Args:
        optimizer: whose rates it sets, group by group.
        total_steps: after how many steps the rate is at its end, at least 1.
        warmup: the share of them in which it rises, in [0, 1].
        last_epoch: how many steps were done before, less one; -1 begins.

    Raises:
        OptimizerError: ``total_steps`` or ``warmup`` is out of range.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, warmup: float = 0.002, last_epoch: int = -1
    ) -> None:
        if total_steps < 1 or not 0 <= warmup <= 1:
            raise OptimizerError(
                f"total_steps={total_steps}, warmup={warmup}: one of them is out of range",
                cure="give the number of steps, at least 1, and the share of them in [0, 1] in which the rate rises",
            )
        self.total_steps, self.warmup = total_steps, warmup
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rate of each group for the next step."""
        rising = self.warmup * self.total_steps
        if self.last_epoch < rising:
            return [float(base) * self.last_epoch / rising for base in self.base_lrs]
        done = min((self.last_epoch - rising) / max(self.total_steps - rising, 1e-9), 1.0)
        return [self._after(float(base), done) for base in self.base_lrs]

    def _after(self, base: float, done: float) -> float:
        """The rate when the share ``done`` of the steps after the rise is done."""
        raise NotImplementedError


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """Then ``base``."""

    def _after(self, base: float, done: float) -> float:
        return base


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """Then ``base * (1 - u)``."""

    def _after(self, base: float, done: float) -> float:
        return base * (1 - done)


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """Then ``base * (1 + cos(2 pi * cycles * u)) / 2``, with ``cycles`` 0.5: down to zero once (SGDR, 2017)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        cycles: float = 0.5,
        warmup: float = 0.002,
        last_epoch: int = -1,
    ) -> None:
        self.cycles = cycles
        super().__init__(optimizer, total_steps, warmup, last_epoch)

    def _after(self, base: float, done: float) -> float:
        return base * max(0.0, 0.5 * (1 + math.cos(2 * math.pi * self.cycles * done)))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """Then ``lr_end + (base - lr_end) * (1 - u) ** degree``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        lr_end: float = 1e-7,
        degree: float = 1.0,
        warmup: float = 0.002,
        last_epoch: int = -1,
    ) -> None:
        self.lr_end, self.degree = lr_end, degree
        super().__init__(optimizer, total_steps, warmup, last_epoch)

    def _after(self, base: float, done: float) -> float:
        return self.lr_end + (base - self.lr_end) * (1 - done) ** self.degree


__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
]
