"""Where a call runs, and the autocast state there."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

_CPU = torch.device("cpu")


def device_of(
    module: torch.nn.Module, tensors: Iterable[torch.Tensor] = (), otherwise: torch.device = _CPU
) -> torch.device:
    """Where a module runs: with its first parameter or buffer, else with what it is given.

    Args:
        module: the module.
        tensors: that it is called with.
        otherwise: where nothing tells it: tensors without dimensions may stay on the CPU.
    """
    held = itertools.chain(module.parameters(), module.buffers(), tensors)
    return next((t.device for t in held if t.dim()), otherwise)


def device_types() -> tuple[str, ...]:
    """The kinds of devices that this machine has; each has an autocast state of its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@dataclasses.dataclass(frozen=True)
class Autocast:
    """The caller's autocast state, entered again inside the captured module (outside it would be lost)."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        """The state in force for a device type."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        """The context to run the forward pass in."""
        if not self.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=True)
