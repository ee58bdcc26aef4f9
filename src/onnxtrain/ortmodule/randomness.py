"""The state of torch's random number generators: kept, and returned to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

import torch

State: TypeAlias = tuple[torch.Tensor, list[torch.Tensor]]


def state() -> State:
    """The generators' state now: the CPU's, and each CUDA device's where CUDA is in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set(wanted: State) -> None:
    torch.set_rng_state(wanted[0])
    if wanted[1]:
        torch.cuda.set_rng_state_all(wanted[1])


@contextlib.contextmanager
def replayed(earlier: State) -> Iterator[None]:
    """Within it the generators go on from an earlier state; afterwards from where they were."""
    now = state()
    _set(earlier)
    try:
        yield
    finally:
        _set(now)
