"""What torch allocates while something runs, measured."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

_CPU = torch.device("cpu")
_SILENT = "6"  # the level of the profiler's log: by itself it says when it begins and ends


def peak_of(step: Callable[[], object], device: torch.device = _CPU) -> int:
    """Most bytes that torch has allocated at once within a call, on a device, beside what was there before.

    Args:
        step: what is called.
        device: the one whose memory is meant.
    """
    if device.type != "cpu":
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        return torch.accelerator.max_memory_allocated(device) - before
    return left_and_peak_of(step)[1]


def left_and_peak_of(step: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a call on the CPU leaves in use, and most that torch has allocated at once within it.

    Args:
        step: what is called.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return alive, peak
