"""The memory in use at the phases of a step, printed beside what is predicted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from onnxtrain.engine.bound import BoundGraph, Chosen
from onnxtrain.engine.budget import needed
from onnxtrain.errors import BackendError
from onnxtrain.processes import rank

InUse: TypeAlias = Mapping[str, tuple[int | None, int | None]]  # by name, bytes now and at most; None: not known
_MIB = 2**20
_FIRST_STEPS = 10
_CUDA = {"allocated": "allocated_bytes", "cached": "reserved_bytes", "inactive": "inactive_split_bytes"}
_PROCESS = Path("/proc/self")


class StepMemory:
    """The memory of one step, printed at its phases: ``pre_forward``, and those that it is told of.

    Args:
        bound: the graph.
        step: its number, from 1.
    """

    def __init__(self, bound: BoundGraph, step: int) -> None:
        self._bound, self._device, self._step = bound, bound.owned.device, step
        if step == 1:
            reset(self._device)
        self._before = self._tell("pre_forward")
        self._predicted: tuple[int, int] | None = None  # bytes between forward and backward, and at most

    @classmethod
    def of(cls, bound: BoundGraph) -> StepMemory | None:
        """Of the next step; None where it is not printed: the first ten are, then powers of two, by rank 0."""
        step = bound.steps + 1
        is_told = step <= _FIRST_STEPS or step & (step - 1) == 0
        return cls(bound, step) if bound.options.print_memory_stats and is_told and rank() == 0 else None

    def after_forward(self, chosen: Chosen, inputs: Mapping[str, torch.Tensor]) -> None:
        """Print ``post_forward``, and what is predicted where the backend can tell it.

        Args:
            chosen: the step's graph.
            inputs: all graph inputs by name.
        """
        with contextlib.suppress(BackendError):
            sizes = self._bound.sizes_of(chosen, inputs)
            footprint = needed(chosen.compiled, sizes, {**inputs, **chosen.named_rows})
            self._predicted = footprint.saved, footprint.peak
        self._tell("post_forward", 0, "tensors since pre_forward")

    def before_backward(self) -> None:
        """Print ``pre_backward``."""
        self._tell("pre_backward")

    def after_backward(self) -> None:
        """Print ``post_backward``."""
        self._tell("post_backward", 1, "tensors since pre_forward at most")

    def _tell(self, phase: str, which: int | None = None, label: str = "") -> int | None:
        """Print what is in use, beside a prediction; returns the bytes that tensors have, where they are counted."""
        found = in_use(self._device)
        counted = found.get("allocated", (None, None))
        parts = [f"rank-0 step {self._step} memory ({phase})", *in_words(found)]
        if which is not None and self._predicted is not None:
            now, predicted = counted[which], f"predicted {self._predicted[which] / _MIB:.1f} MiB"
            real = [] if now is None or self._before is None else [f"{(now - self._before) / _MIB:.1f} MiB"]
            parts.append(f"{label}: {', '.join([*real, predicted])}")
        print(" | ".join(parts), flush=True)
        return counted[0]


def in_use(device: str) -> InUse:
    """What is in use: of the CUDA allocator; elsewhere, where nobody counts tensors, what the process has resident."""
    if device != "cpu" and torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        return {n: (stats[f"{key}.all.current"], stats[f"{key}.all.peak"]) for n, key in _CUDA.items()}
    if (_PROCESS / "status").exists():
        rows = dict(line.split(":", 1) for line in (_PROCESS / "status").read_text().splitlines())
        now, most = (int(rows[name].split()[0]) * 1024 if name in rows else None for name in ("VmRSS", "VmHWM"))
        return {"resident": (now, most)}
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in KiB everywhere else
    return {"resident": (None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}


def in_words(found: InUse) -> list[str]:
    """``allocated 12 MiB, at most 15 MiB``, for each."""
    rows = []
    for name, (now, most) in found.items():
        texts = ("" if now is None else f"{now // _MIB} MiB", "" if most is None else f"at most {most // _MIB} MiB")
        rows.append(f"{name} {', '.join(filter(None, texts))}")
    return rows


def reset(device: str) -> None:
    """Give back what is cached but not used, and let peaks begin anew, where that can be."""
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")  # Linux: the most that was resident
