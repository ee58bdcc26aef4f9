"""The autocast state of a call."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch


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
