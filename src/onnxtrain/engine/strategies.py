"""What a rank holds, sends and waits for in a step, by each strategy of ``onnxtrain.cluster``.

What each holds follows ZeRO (Rajbhandari et al., 2020, section 5) and what DeepSpeed 0.19 and FSDP2 allocate beside it.
Collectives are those of rings (Patarasuk and Yuan, 2009): a rank sends ``(n - 1) / n`` of a tensor for an all-gather or
a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from onnxtrain.cluster import OPTIMIZERS, STRATEGIES, Cluster

_REUSED, _AHEAD = 1_000_000_000, 50_000_000  # elements: DeepSpeed's max_reuse_distance and prefetch_bucket_size
_STATE = 4  # bytes of a number of the optimizer's state where DeepSpeed keeps it, and of its copy of a parameter


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
    seconds: tuple[float, float]
    bandwidth: float

    @property
    def all(self) -> int:
        """Bytes of all parameters."""
        return self.weights + self.frozen

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.weights // max(1, self.elements)

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
class Memory:
    """Bytes of a rank, as ``RankPlan`` has them; ``updated``: of parameters that its optimizer changes."""

    parameters: int
    optimizer: int
    buffers: int
    passing: int
    updated: int


def memory_of(step: Step, cluster: Cluster, ranks: int, strategy: str) -> Memory:
    """What a rank holds.

    Args:
        step: of one rank.
        cluster: the ranks.
        ranks: how many there are.
        strategy: how they share.
    """
    return _MEMORY[strategy](step, cluster, ranks)


def waiting(step: Step, strategy: str, gradients: float, gathered: float) -> float:
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
    if strategy in ("fsdp2-layers", "zero3"):
        return shown(gathered / 2, forward) + shown(gathered / 2 + gradients, backward)
    return gathered + shown(gradients, backward)


def sent(step: Step, ranks: int, strategy: str) -> tuple[float, float]:
    """Bytes that a rank sends in a step: of gradients, and of parameters."""
    part = (ranks - 1) / ranks
    if strategy == "ddp":
        return 2 * part * step.weights, 0.0
    gathered = {
        "zero1": step.weights,
        "zero2": step.weights,
        "zero3": 2 * step.all - _kept(step),  # for the forward pass, and for the backward pass
        "fsdp2": step.all,
        "fsdp2-layers": 2 * step.all - step.root,
    }
    return part * step.weights, part * gathered[strategy]


def _ddp(step: Step, cluster: Cluster, ranks: int) -> Memory:
    """All of everything, and the buckets that gradients are copied to."""
    states = OPTIMIZERS[cluster.optimizer] * step.weights
    passing = max(step.first, step.most(), step.weights)
    return Memory(step.all, states, step.weights, passing, step.weights)


def _zero(stage: int) -> Callable[[Step, Cluster, int], Memory]:
    """DeepSpeed's stage 1 or 2: an optimizer for a share of the parameters, in 32 bits, which is a copy of these."""

    def memory(step: Step, cluster: Cluster, ranks: int) -> Memory:
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
        return Memory(step.all, states, 0, max(step.first, backward, update), own * _STATE)

    return memory


def _in_buckets(made: int, bucket: int, ranks: int) -> float:
    """What DeepSpeed holds of gradients: a share of those that were sent, the bucket, and a copy of what is in it."""
    if not made:
        return 0.0
    waiting = min(made, bucket)
    return (made - waiting) / ranks + bucket + (waiting if ranks > 1 else 0)


def _kept(step: Step) -> int:
    """Bytes of parameters that DeepSpeed's stage 3 does not release in the forward pass: they are read again soon."""
    return min(step.all, _REUSED // 2 * step.width + step.layer)


def _zero3(step: Step, cluster: Cluster, ranks: int) -> Memory:
    """Parameters in shards; those of a module are gathered before it runs, as DeepSpeed's defaults have it.

    What is read again within ``_REUSED`` elements, there and back, stays after the forward pass. ``_AHEAD`` elements
    are fetched before they are needed, and are there once more as they came, until they are. Gradients go to a bucket
    that is there all the time; to reduce it takes a copy, and a share of it.
    """
    own, several = -(-step.elements // ranks), ranks > 1
    bucket, states = cluster.bucket * step.width, (1 + OPTIMIZERS[cluster.optimizer]) * own * _STATE
    kept, ahead = _kept(step), min(step.all, _AHEAD * step.width)

    def forward(line: Line) -> int:
        return line.most + (kept + (ahead if line.is_in_layer else 0) if several else 0)

    def backward(line: Line) -> float:
        given = line.made // step.layer * step.layer if step.layer else line.made
        gathered = min(kept, step.all - given) + (ahead if line.is_in_layer and kept < step.all else 0)
        return line.most - given + (gathered + min(given, bucket) * (1 + 1 / ranks) if several else 0)

    passing = max([own * _STATE, *map(forward, step.forward), *(int(backward(line)) for line in step.backward)])
    return Memory(step.all // ranks, states, step.weights // ranks + bucket, passing, own * _STATE)


def _fsdp2(step: Step, cluster: Cluster, ranks: int) -> Memory:
    """All in shards, gathered as a whole; the buffer of the all-gather is held until the forward pass is over."""
    states = OPTIMIZERS[cluster.optimizer] * step.weights // ranks
    gathered = step.all
    forward = step.first + gathered + (gathered if ranks > 1 else 0)
    passing = max(forward, step.most() + gathered, 2 * step.weights)
    return Memory(step.all // ranks, states, 0, passing, step.weights // ranks)


def _fsdp2_layers(step: Step, cluster: Cluster, ranks: int) -> Memory:
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
    return Memory(step.all // ranks, OPTIMIZERS[cluster.optimizer] * own, 0, passing, own)


_MEMORY: Mapping[str, Callable[[Step, Cluster, int], Memory]] = {
    "ddp": _ddp,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero3,
    "fsdp2": _fsdp2,
    "fsdp2-layers": _fsdp2_layers,
}
assert {*_MEMORY} == {*STRATEGIES}
__all__ = ["Line", "Memory", "Step", "memory_of", "sent", "waiting"]
