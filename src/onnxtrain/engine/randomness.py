"""Random number generators: their state kept and returned to, and what seeds all of them."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import TypeAlias

import torch

State: TypeAlias = tuple[torch.Tensor, list[torch.Tensor]]


def state() -> State:
    """The generators' state now: the CPU's, and each CUDA device's where CUDA is in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def restore(wanted: State) -> None:
    """Let the generators go on from an earlier state."""
    torch.set_rng_state(wanted[0])
    if wanted[1]:
        torch.cuda.set_rng_state_all(wanted[1])


def set_seed(seed: int) -> None:
    """Seed what random operators draw from on any backend: torch's generators, and onnxruntime's where it is there."""
    override_torch_manual_seed(seed)


def override_torch_manual_seed(seed: int) -> torch.Generator:
    """``torch.manual_seed`` that seeds onnxruntime too; the name is that of onnxruntime-training."""
    if importlib.util.find_spec("onnxruntime") is not None:
        from onnxtrain.execute import onnxruntime

        onnxruntime.set_seed(seed)
    return torch.manual_seed(seed)


@contextlib.contextmanager
def replayed(earlier: State) -> Iterator[None]:
    """Within it the generators go on from an earlier state; afterwards from where they were."""
    now = state()
    restore(earlier)
    try:
        yield
    finally:
        restore(now)
