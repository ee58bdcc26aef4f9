"""Which segments of a backward pass are one node of autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from onnxtrain.compiler import Compiled
from onnxtrain.ir.parts import merged
from onnxtrain.options import Options

# Floating point operations of a step for each of its parts: a part costs 30 to 200 microseconds of the host's time, and
# an accelerator does more in it. Among processes parts hide communication, which is worth more.
_LEAST_WORK = {"cpu": 4 * 10**9, "accelerator": 4 * 10**11}
_AMONG_PROCESSES = 4  # times as many parts


@dataclasses.dataclass(frozen=True)
class Part:
    """Segments of a backward pass that are one node of autograd.

    Args:
        names: the differentiable inputs whose gradients it gives; in the first part also those that have none.
        places: where these are among the gradients of the plan.
        segments: how many segments it has.
    """

    names: tuple[str, ...]
    places: tuple[int | None, ...]
    segments: int


class Parts:
    """The parts of the backward passes of compiled graphs.

    Args:
        options: how many there may be.
        device: where the graphs run.
    """

    def __init__(self, options: Options, device: str) -> None:
        self._options, self._least = options, _LEAST_WORK["cpu" if device == "cpu" else "accelerator"]
        self._known: dict[tuple[int, bool], Sequence[Part]] = {}
        self._most: int | None = None

    def of(
        self,
        compiled: Compiled,
        inputs: Mapping[str, torch.Tensor],
        work: Callable[[], tuple[int, int] | None],
    ) -> Sequence[Part]:
        """The parts of one, in the order of its backward pass.

        Args:
            compiled: the graph.
            inputs: all its inputs by name; hooks that take their gradients want them as early as may be.
            work: gives the operations of a step, and eager's; None where they cannot be told. The first step decides.
        """
        key = id(compiled), any(getattr(x, "_post_accumulate_grad_hooks", None) for x in inputs.values())
        if key not in self._known:
            plan = compiled.plan
            places = {name: place for place, name in enumerate(plan.gradients)}
            rest = tuple(n for n in plan.signature.differentiable if n not in places)
            made: list[Part] = []
            for group in merged(plan.segments, self._limit(compiled, key[1], work)) or [[]]:
                names = sum((s.gradients for s in group), () if made else rest)
                made.append(Part(names, tuple(map(places.get, names)), len(group)))
            self._known[key] = made
        return self._known[key]

    def count(self, compiled: Compiled) -> int:
        """How many there are; 0 where the graph has not been trained."""
        return max(len(self._known.get((id(compiled), early), ())) for early in (False, True))

    def _limit(self, compiled: Compiled, early: bool, work: Callable[[], tuple[int, int] | None]) -> int:
        """How many nodes of autograd there may be: as many as do not show in the time of a step, if not early ones."""
        if not compiled.executable.has_segments or len(compiled.plan.segments) < 2:
            return 1
        if self._options.segments == "all" or (early and self._options.segments is None):
            return sum(segment.nodes for segment in compiled.plan.segments)  # so that none are merged
        if isinstance(self._options.segments, int):
            return self._options.segments
        if self._most is None:
            operations = work()
            alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
            times = 1 if alone else _AMONG_PROCESSES
            self._most = 1 if operations is None else max(1, operations[0] * times // self._least)
        return self._most
