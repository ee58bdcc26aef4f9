"""Which segments of a backward pass are one node of autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch
import torch.distributed as dist

from onnxtrain.capture import Path
from onnxtrain.compiler import Compiled
from onnxtrain.ir.graphs import Plan
from onnxtrain.ir.parts import merged
from onnxtrain.options import Options
from onnxtrain.plan.segments import reads_in_parts

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
        graph: the forward graph that all of them are made of.
        path: what it stands on; other processes may be on another one.
    """

    def __init__(self, options: Options, device: str, graph: ir.Graph, path: Path) -> None:
        self._graph, self._is_steered = graph, bool(path)
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
            if key[1] and _is_among_processes():
                self._known[key] = self._agreed(compiled.plan)
            else:
                self._known[key] = _parts(compiled.plan, self._limit(compiled, key[1], work))
        return self._known[key]

    def _agreed(self, plan: Plan) -> Sequence[Part]:
        """Parts that every process has, whatever its batch made of the graph: in this order hooks send gradients.

        So they are not of the plan's segments, but of the order in which the forward graph reads, from its end. Where
        processes may have several graphs, they are in the module's own order, one by one.
        """
        trained, made, done = {*plan.signature.differentiable}, list[Part](), 0
        order = [[str(v.name)] for v in self._graph.inputs] if self._is_steered else reads_in_parts(self._graph)
        found = (tuple(n for n in reversed(part) if n in trained) for part in reversed(order))
        groups = [*filter(None, found)]
        chosen = self._options.segments if plan.segments else 1
        most = min(chosen if isinstance(chosen, int) else len(groups), len(groups))
        places = {name: place for place, name in enumerate(plan.gradients)}
        segment = {name: index for index, part in enumerate(plan.segments, 1) for name in part.gradients}
        for index in range(most):
            part = sum(groups[index * len(groups) // most : (index + 1) * len(groups) // most], ())
            upto = max([done, *(segment.get(name, 0) for name in part)])
            made.append(Part(part, tuple(map(places.get, part)), upto - done))
            done = upto
        return made

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
            times = _AMONG_PROCESSES if _is_among_processes() else 1
            self._most = 1 if operations is None else max(1, operations[0] * times // self._least)
        return self._most


def _parts(plan: Plan, most: int) -> Sequence[Part]:
    """The segments of a plan in so many parts at most."""
    places = {name: place for place, name in enumerate(plan.gradients)}
    rest = tuple(n for n in plan.signature.differentiable if n not in places)
    made: list[Part] = []
    for group in merged(plan.segments, most) or [[]]:
        names = sum((s.gradients for s in group), () if made else rest)
        made.append(Part(names, tuple(map(places.get, names)), len(group)))
    return made


def _is_among_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
