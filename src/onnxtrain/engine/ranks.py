"""What a step needs and takes on many ranks, told on one machine: ``ORTModule.plan``.

Its bytes and seconds are planned for one rank; what ranks hold and send besides is that of each strategy.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from onnxtrain.cluster import Cluster
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.costs import least_of, moved_by, operations
from onnxtrain.engine.memory_report import Planned, planned
from onnxtrain.engine.strategies import Line, Step, memory_of, sent, waiting
from onnxtrain.execute.torch.speeds import Speeds
from onnxtrain.ir.concrete import bytes_of
from onnxtrain.ir.modules import modules_of

_TOUCHED = 3  # times that an optimizer's step goes over parameters and state: reads both, reads gradients, writes both
_LAYER = re.compile(r"(.*?\.)?\d+\.")  # what the name of a parameter or module begins with that is of a layer in a list


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What a step needs and takes at each rank; bytes and seconds.

    Args:
        ranks: how many there are.
        strategy: how they share, see ``onnxtrain.cluster.STRATEGIES``.
        parameters: that a rank has between steps, buffers of the module among them.
        optimizer: its state at a rank, and its copy of parameters.
        buffers: that the engine has all the time.
        passing: most that is in use at once within a step beside all that.
        sent: bytes that a rank sends in a step.
        computing: at least, at the speeds of a rank.
        waiting: for what is sent while nothing is computed; None where the speed of links is not stated.
        fits: whether the peak is within a rank's memory; None where that is not stated.
    """

    ranks: int
    strategy: str
    parameters: int
    optimizer: int
    buffers: int
    passing: int
    sent: int
    computing: float
    waiting: float | None
    fits: bool | None

    @property
    def peak(self) -> int:
        """Most bytes in use at once at a rank."""
        return self.parameters + self.optimizer + self.buffers + self.passing

    @property
    def seconds(self) -> float | None:
        """Of a step at least; None where the speed of links is not stated."""
        return None if self.waiting is None else self.computing + self.waiting


def step_of(bound: BoundGraph, tensors: Sequence[torch.Tensor], cluster: Cluster) -> Step:
    """A step of one rank, which is planned for a batch and not run.

    Args:
        bound: its graph.
        tensors: the user's.
        cluster: what a rank can do.

    Raises:
        BackendError: the backend cannot tell.
        BudgetError: the step cannot be made to fit.
    """
    plan = planned(bound, tensors)
    compiled, trained = plan.fit.compiled.plan, {*plan.trained}
    size = {name: plan.inputs[name].nbytes for name in (*bound.signature.parameters, *bound.signature.buffers)}
    layers, weights = Counter[str](), sum(size[name] for name in trained)
    for name in bound.signature.parameters:
        layers[found[0] if (found := _LAYER.match(name)) else ""] += size[name]
    root = layers.pop("", 0)
    produced = {v: size[name] for name, v in compiled.gradients.items() if name in trained}
    forward, backward = _lines(plan, produced)
    speeds = _Speeds(cluster, bound.owned.device)
    return Step(
        elements=sum(plan.inputs[name].numel() for name in trained),
        weights=weights,
        frozen=sum(size.values()) - weights,
        layer=max(layers.values(), default=0),
        root=root,
        forward=forward,
        backward=backward,
        segments=max(1, len(compiled.segments)),
        seconds=_seconds(plan, speeds),
        bandwidth=speeds.bandwidth,
    )


def plans_of(step: Step, cluster: Cluster) -> list[RankPlan]:
    """What the step needs and takes, for each strategy and number of ranks.

    Args:
        step: of one rank.
        cluster: the ranks.
    """
    return [_plan(step, cluster, ranks, strategy) for ranks in cluster.ranks for strategy in cluster.strategies]


def _lines(plan: Planned, produced: Mapping[str, int]) -> tuple[list[Line], list[Line]]:
    """The lines of either pass, the last one as it leaves what it made.

    Args:
        plan: of the step.
        produced: bytes of gradients by the names of their values.
    """
    models = (plan.fit.compiled.plan.forward, plan.fit.compiled.plan.backward)
    inside = {v.name for m in models if m is not None for n in m.graph if _is_in_layer(n) for v in n.outputs}
    found: dict[str, list[Line]] = {"forward": [], "backward": []}
    made, rest = 0, 0
    for use in plan.footprint.uses:
        found[use.part].append(Line(use.most, made, use.value in inside))
        made, rest = made + produced.get(use.value, 0), use.rest
    return found["forward"], [*found["backward"], Line(rest, made, is_in_layer=False)]


def _is_in_layer(node: ir.Node) -> bool:
    return any(_LAYER.match(f"{name}.") for name, _ in modules_of(node))


class _Speeds:
    """What a rank can do: as it is stated, else as this machine does, which is measured where it is asked for.

    Args:
        cluster: says what is stated.
        device: of this machine.
    """

    def __init__(self, cluster: Cluster, device: str) -> None:
        self._cluster, self._device = cluster, device

    @functools.cached_property
    def _measured(self) -> Speeds:
        return Speeds(self._device)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the memory moves."""
        return float(self._cluster.bandwidth or self._measured.bandwidth)

    def of_products(self, dtype: torch.dtype) -> float:
        """Operations a second in products."""
        return float(self._cluster.speed or self._measured.of_products(dtype))


def _seconds(plan: Planned, speeds: _Speeds) -> tuple[float, float]:
    """What forward and backward take at least."""
    counted: dict[str, int] = {}

    def least(node: ir.Node) -> float:
        read, written = (
            sum(bytes_of(v, plan.sizes) or 0 for v in values if v is not None) for values in (node.inputs, node.outputs)
        )
        return least_of(node, moved_by(node.op_type, read, written), operations(node, plan.sizes, counted), speeds)

    compiled = plan.fit.compiled.plan
    passes = [() if model is None else model.graph for model in (compiled.forward, compiled.backward)]
    forward, backward = (sum(map(least, nodes)) for nodes in passes)
    return forward, backward


def _plan(step: Step, cluster: Cluster, ranks: int, strategy: str) -> RankPlan:
    memory = memory_of(step, cluster, ranks, strategy)
    (gradients, gathered), link = sent(step, ranks, strategy), float(cluster.link or 1.0)
    forward, backward = step.seconds
    updated = _TOUCHED * (memory.optimizer + memory.updated + step.weights // ranks) / step.bandwidth
    made = RankPlan(
        ranks=ranks,
        strategy=strategy,
        parameters=memory.parameters,
        optimizer=memory.optimizer,
        buffers=memory.buffers,
        passing=memory.passing,
        sent=int(gradients + gathered),
        computing=forward + backward + updated,
        waiting=None if cluster.link is None else waiting(step, strategy, gradients / link, gathered / link),
        fits=None,
    )
    return made if cluster.memory is None else dataclasses.replace(made, fits=made.peak <= int(cluster.memory))


__all__ = ["RankPlan", "plans_of", "step_of"]
