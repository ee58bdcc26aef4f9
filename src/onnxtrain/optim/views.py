"""An optimizer with other parameters than its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def update_of(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """The class's step without the hooks on it, which are called when the user calls ``step()``."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def view_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> torch.optim.Optimizer:
    """The same optimizer with other groups; what it sets on itself stays there."""
    view = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__, param_groups=groups, state=state)
    return view
