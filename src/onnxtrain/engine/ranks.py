"""What a step needs and takes on many ranks, told on one machine: ``ORTModule.plan``.

What each strategy holds follows ZeRO (Rajbhandari et al., 2020, section 5) and what DeepSpeed 0.19 and FSDP2 allocate
beside it. Collectives are those of rings (Patarasuk and Yuan, 2009): a rank sends ``(n - 1) / n`` of a tensor for an
all-gather or a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch

from onnxtrain.cluster import OPTIMIZERS, STRATEGIES, Cluster
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.costs import least_of, moved_by, operations
from onnxtrain.engine.memory_report import Planned, planned
from onnxtrain.execute.torch.speeds import Speeds
from onnxtrain.ir.concrete import bytes_of
from onnxtrain.ir.modules import modules_of

_STATE = 4  # bytes of a number of the optimizer's state where DeepSpeed keeps it, and of its copy of a parameter
_TOUCHED = 3  # times that an optimizer's step goes over parameters and state: reads both, reads gradients, writes both
_LAYER = re.compile(r"(.*?\.)?\d+\.")  # what the name of a parameter or module begins with that is of a layer in a list


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a pass.

    Args:
        most: bytes in use at once at most.
        made: bytes of gradients among them that were made before.
        is_in_layer: whether it comes from a layer that a list holds.
    """

    most: int
    made: int
    is_in_layer: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one rank.

    Args:
        elements: of trained parameters.
        weights: bytes of trained parameters, and of their gradients.
        frozen: bytes of the others, and of buffers.
        layer: bytes of the largest layer that a list holds.
        root: bytes of what no such layer holds.
        forward: for each line of the forward pass the most bytes in use beside all of these.
        backward: for each line of the backward pass.
        segments: how often gradients come.
        late: bytes of outputs that are computed where somebody reads them.
        seconds: that the passes take at least, at the speeds of a rank.
        bandwidth: bytes a second of a rank's memory.
    """

    elements: int
    weights: int
    frozen: int
    layer: int
    root: int
    forward: Sequence[Line]
    backward: Sequence[Line]
    segments: int
    late: int
    seconds: tuple[float, float]
    bandwidth: float

    @property
    def all(self) -> int:
        """Bytes of all parameters."""
        return self.weights + self.frozen

    @property
    def first(self) -> int:
        """Most bytes in use in the forward pass."""
        return max((line.most for line in self.forward), default=0)

    def most(self, beside: Callable[[int], float] = float) -> int:
        """Most bytes in use in the backward pass.

        Args:
            beside: for the bytes of gradients that were made, how many are held for them; by default these.
        """
        return max((int(line.most - line.made + beside(line.made)) for line in self.backward), default=0)


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
    made = {v.name for node in compiled.forward.graph for v in node.outputs}
    late = [v for v in bound.graph.model.graph.outputs if v.name in bound.signature.outputs and v.name not in made]
    return Step(
        elements=sum(plan.inputs[name].numel() for name in trained),
        weights=weights,
        frozen=sum(size.values()) - weights,
        layer=max(layers.values(), default=0),
        root=root,
        forward=forward,
        backward=backward,
        segments=max(1, len(compiled.segments)),
        late=sum(bytes_of(v, plan.sizes) or 0 for v in late),
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
    memory = _MEMORY[strategy](step, cluster, ranks)
    (gradients, gathered), link = _sent(step, ranks, strategy), float(cluster.link or 1.0)
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
        waiting=None if cluster.link is None else _waiting(step, strategy, gradients / link, gathered / link),
        fits=None,
    )
    return made if cluster.memory is None else dataclasses.replace(made, fits=made.peak <= int(cluster.memory))


def _waiting(step: Step, strategy: str, gradients: float, gathered: float) -> float:
    """Seconds of sending that computing does not hide: those beyond a pass, or of the piece at its end.

    Args:
        step: of one rank.
        strategy: the strategy.
        gradients: seconds that these are sent.
        gathered: seconds that parameters are.
    """

    def shown(sent: float, computing: float) -> float:
        return max(sent - computing, sent / step.segments)

    forward, backward = step.seconds
    if strategy == "fsdp2-layers":
        return shown(gathered / 2, forward) + shown(gathered / 2 + gradients, backward)
    return gathered + shown(gradients, backward)


def _sent(step: Step, ranks: int, strategy: str) -> tuple[float, float]:
    """Bytes that a rank sends in a step: of gradients, and of parameters."""
    part = (ranks - 1) / ranks
    if strategy == "ddp":
        return 2 * part * step.weights, 0.0
    gathered = {
        "zero1": step.weights,
        "zero2": step.weights,
        "zero3": 2 * step.all,  # for the forward pass, and for the backward pass
        "fsdp2": step.all,
        "fsdp2-layers": 2 * step.all - step.root,
    }
    return part * step.weights, part * gathered[strategy]


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes of a rank, as ``RankPlan`` has them; ``updated``: of parameters that its optimizer changes."""

    parameters: int
    optimizer: int
    buffers: int
    passing: int
    updated: int


def _ddp(step: Step, cluster: Cluster, ranks: int) -> _Memory:
    """All of everything, and the buckets that gradients are copied to."""
    states = OPTIMIZERS[cluster.optimizer] * step.weights
    passing = max(step.first, step.most(), step.weights)
    return _Memory(step.all, states, step.weights, passing, step.weights)


def _zero(stage: int) -> Callable[[Step, Cluster, int], _Memory]:
    """DeepSpeed's stage 1 or 2: an optimizer for a share of the parameters, in 32 bits, which is a copy of these."""

    def memory(step: Step, cluster: Cluster, ranks: int) -> _Memory:
        own = -(-step.elements // ranks)
        bucket = cluster.bucket * step.weights // max(1, step.elements)
        gradients = step.weights // ranks
        if stage == 1:
            backward = step.most(lambda made: made + (bucket if made else 0))
            update = step.weights + own * _STATE
        else:
            backward = step.most(lambda made: _in_buckets(made, bucket, ranks))
            update = gradients + own * _STATE
        states = (1 + OPTIMIZERS[cluster.optimizer]) * own * _STATE
        return _Memory(step.all, states, 0, max(step.first, backward, update), own * _STATE)

    return memory


def _in_buckets(made: int, bucket: int, ranks: int) -> float:
    """What DeepSpeed holds of gradients: a share of those that were sent, the bucket, and a copy of what is in it."""
    if not made:
        return 0.0
    waiting = min(made, bucket)
    return (made - waiting) / ranks + bucket + (waiting if ranks > 1 else 0)


def _zero3(step: Step, cluster: Cluster, ranks: int) -> _Memory:
    """Parameters in shards; an ORTModule's are gathered as a whole, and its gradients come at once."""
    own = -(-step.elements // ranks)
    width = step.weights // max(1, step.elements)
    gathered = step.all if ranks > 1 else 0
    buffers = step.weights // ranks + cluster.bucket * width
    states = (1 + OPTIMIZERS[cluster.optimizer]) * own * _STATE
    passing = max(step.first, step.most()) + step.late + gathered  # DeepSpeed's hooks read all outputs
    return _Memory(step.all // ranks, states, buffers, max(passing, own * _STATE), own * _STATE)


def _fsdp2(step: Step, cluster: Cluster, ranks: int) -> _Memory:
    """All in shards, gathered as a whole; the buffer of the all-gather is held until the forward pass is over."""
    states = OPTIMIZERS[cluster.optimizer] * step.weights // ranks
    gathered = step.all
    forward = step.first + gathered + (gathered if ranks > 1 else 0)
    passing = max(forward, step.most() + gathered, 2 * step.weights)
    return _Memory(step.all // ranks, states, 0, passing, step.weights // ranks)


def _fsdp2_layers(step: Step, cluster: Cluster, ranks: int) -> _Memory:
    """All in shards; a layer is gathered while it runs, and what is in no layer stays gathered.

    A gathered layer is there once more as the all-gather left it, in the forward pass until the next one comes; in the
    backward pass that of the layer before is there by then. A layer's gradients are copied to be reduced, and the copy
    is held until the next layer's are there.
    """
    own, copies, layer = step.weights // ranks, 1 if ranks > 1 else 0, step.layer
    last = step.weights - step.root - layer  # of gradients, after which no other layer is gathered

    def forward(line: Line) -> int:
        return line.most + step.root + (1 + copies if line.is_in_layer else copies) * layer

    def backward(line: Line) -> float:
        reduced = line.made // layer * layer if layer else line.made
        gathered = (1 + (copies if line.made < last else 0)) * layer if line.is_in_layer else 0
        sent = layer if reduced else 0
        return line.most - reduced + reduced / ranks + step.root + gathered + sent

    passing = max([own, *map(forward, step.forward), *(int(backward(line)) for line in step.backward)])
    return _Memory(step.all // ranks, OPTIMIZERS[cluster.optimizer] * own, 0, passing, own)


_MEMORY: Mapping[str, Callable[[Step, Cluster, int], _Memory]] = {
    "ddp": _ddp,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero3,
    "fsdp2": _fsdp2,
    "fsdp2-layers": _fsdp2_layers,
}
assert {*_MEMORY} == {*STRATEGIES}
__all__ = ["RankPlan", "Step", "plans_of", "step_of"]
