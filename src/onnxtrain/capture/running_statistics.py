"""Which functions of torch move running statistics, and which: what they write there torch does not always count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_NORMALIZING: dict[Callable[..., Any], tuple[int, str]] = {  # where running statistics are, and what moves them
    F.batch_norm: (1, "training"),
    F.instance_norm: (1, "use_input_stats"),
    torch.batch_norm: (3, "training"),
    torch.instance_norm: (3, "use_input_stats"),
    torch.native_batch_norm: (3, "training"),
}
UNCOUNTED = frozenset((F.batch_norm, torch.batch_norm, torch.native_batch_norm))  # without a change of version


def statistics_moved(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor] | None:
    """The running mean and variance that a normalization updates; None where a function is none."""
    if func not in _NORMALIZING:
        return None
    first, flag = _NORMALIZING[func]
    places = {"running_mean": first, "running_var": first + 1, flag: 5}
    mean, variance, moves = (args[place] if place < len(args) else kwargs.get(name) for name, place in places.items())
    moves = func is F.instance_norm if moves is None else moves
    return [x for x in (mean, variance) if isinstance(x, torch.Tensor)] if moves else []


__all__ = ["UNCOUNTED", "statistics_moved"]
