"""Values that the backward pass computes again rather than keeps: which, in what order, and how."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphError, ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.concrete import bytes_of, size_of
from onnxtrain.ir.graphs import BACKWARD, DOMAIN, RECOMPUTED, Plan, TrainingGraph, free_name, is_backward
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan.formulas import as_dim, count_of
from onnxtrain.plan.lifetimes import owners

SUFFIX = "_recompute"  # of the names of what is computed again
_MOST = 64  # nodes that are computed again for one value
_SHARE = 100_000  # of all that could be computed again: a smaller value is not worth it
_MOMENT = 1e-9  # seconds
_WORSE = 8  # times as much time for a byte as running the whole forward pass again takes
_SLACK = 4  # times the bytes of a value that others may have, which are there earlier because of it
_RATES = {"cpu": (5e10, 1e10), "accelerator": (1e14, 1e12)}  # operations and bytes in a second: their ratio counts


@dataclasses.dataclass(frozen=True)
class Choice:
    """Saved values that share one memory, as they are computed again.

    Args:
        dropped: their names.
        kept: names of values that are saved instead.
        nodes: the operators that run again.
        at: the place in the backward pass where they do.
        gain: bytes that are no longer saved.
        seconds: an estimate of the time.
    """

    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    nodes: tuple[ir.Node, ...]
    at: int
    gain: int
    seconds: float

    @property
    def worth(self) -> float:
        """Bytes for a second."""
        return self.gain / (self.seconds + _MOMENT)

    @property
    def cluster(self) -> str:
        """The operators, each followed by a plus: ``Linear+Gelu+``."""
        return "".join(f"{n.op_type}+" for n in self.nodes)


def choices(training: TrainingGraph, plan: Plan, sizes: Mapping[str, int], device: str) -> list[Choice]:
    """What can be computed again, in the order in which it is worth most: bytes saved for the time it takes.

    Each is meant together with those before it.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        device: where it runs.
    """
    return list(Search(training, plan, sizes, device).run())


@dataclasses.dataclass(frozen=True)
class Look:
    """What it takes to compute values again.

    Args:
        members: the values.
        nodes: what runs again.
        extra: what is saved for it that was not.
        at: the place in the backward pass where it does.
        earlier: values that are computed again anyway, but not as early.
    """

    members: Sequence[ir.Value]
    nodes: Collection[ir.Node]
    extra: Collection[ir.Value]
    at: int
    earlier: frozenset[ir.Value]


def anything(node: ir.Node) -> bool:
    """Whether a node may run again: each that can."""
    return True


class Search:
    """The search for what to compute again.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        device: where it runs.
    """

    def __init__(self, training: TrainingGraph, plan: Plan, sizes: Mapping[str, int], device: str) -> None:
        self.sizes = sizes
        self.flops, self.bandwidth = _RATES["cpu" if device == "cpu" else "accelerator"]
        graph = training.model.graph
        self.forward = [n for n in graph if not is_backward(n)]
        self.order = {n: i for i, n in enumerate(self.forward)}
        self.owners = owners(self.forward)
        self.named = named = {str(v.name): v for v in (*graph.inputs, *(v for n in self.forward for v in n.outputs))}
        visible = {*training.signature.outputs, *training.signature.buffer_updates.values()}
        held = {self.owner(named[n]) for n in visible if n in named}
        self.kept = {named[n] for n in plan.saved if n in named}
        self.groups: dict[ir.Value, list[ir.Value]] = {}
        for value in self.kept:
            owner = self.owner(value)
            node = owner.producer()
            again = node in self.order and can_run_again(node, owner, self.kept)
            if again and owner not in held and self.size(owner):
                self.groups.setdefault(owner, []).append(value)
        least = sum(map(self.size, self.groups)) // _SHARE
        self.groups = {owner: found for owner, found in self.groups.items() if self.size(owner) > least}
        self.slack = 0  # how many times what is gained may be there earlier
        self.dropped: set[ir.Value] = set()
        self.at: dict[ir.Node, int] = {}  # of those that run again for an earlier choice, when
        backward = [n for n in graph if is_backward(n)]
        self.read = {v: i for i, n in reversed(list(enumerate(backward))) for v in n.inputs if v is not None}

    def owner(self, value: ir.Value) -> ir.Value:
        """The value whose memory a value has."""
        return self.owners.get(value, value)

    def run(self) -> Iterator[Choice]:
        """One value after the other, then those together that are worth it only so; what takes long comes later.

        At last come values for which others have to be there earlier: at a place where less is in use than at the peak.
        """
        whole = sum(map(self.size, self.groups)) / (sum(map(self._seconds, self.forward)) + _MOMENT)
        for least, self.slack in ((whole / _WORSE, 0), (0.0, 0), (0.0, _SLACK)):
            yield from self._by_worth([(owner,) for owner in self._in_order(self.groups)], least)
            together: dict[frozenset[ir.Value], list[ir.Value]] = {}
            for owner in self._in_order(self.groups):
                if found := self.look((owner,), deep=True):
                    together.setdefault(found.earlier, []).append(owner)
            yield from self._by_worth([tuple(owners) for owners in together.values() if len(owners) > 1], least)

    def _by_worth(self, candidates: Iterable[tuple[ir.Value, ...]], least: float) -> Iterator[Choice]:
        ticket = itertools.count()
        found = ((owners, self._best(owners)) for owners in candidates)
        heap = [(-choice.worth, next(ticket), owners) for owners, choice in found if choice]
        heapq.heapify(heap)
        while heap:
            worth, at, owners = heapq.heappop(heap)
            choice = self._best(owners)
            if choice is None or choice.worth < least:
                continue
            if heap and choice.worth < min(-worth, -heap[0][0]):
                heapq.heappush(heap, (-choice.worth, at, owners))
                continue
            self._take(owners, choice)
            yield choice

    def _in_order(self, owners: Iterable[ir.Value]) -> list[ir.Value]:
        return sorted(owners, key=lambda v: self.order[v.producer()])  # type: ignore[index]

    def _take(self, owners: Iterable[ir.Value], choice: Choice) -> None:
        for owner in owners:
            self.kept.difference_update(self.groups.pop(owner))
            self.dropped.add(owner)
        self.at.update(dict.fromkeys(choice.nodes, choice.at))
        for value in itertools.chain.from_iterable(map(operands, choice.nodes)):
            self.read[value] = min(choice.at, self.read.get(value, choice.at))
        self.kept.update(self.named[name] for name in choice.kept)

    def _best(self, owners: tuple[ir.Value, ...]) -> Choice | None:
        """The better of computing all that is needed again, and of saving what an expensive operator gave instead."""
        found = [self.choice(owners, look) for look in (self.look(owners, deep) for deep in (False, True)) if look]
        return max(filter(None, found), key=lambda c: c.worth, default=None)

    def choice(self, owners: tuple[ir.Value, ...], look: Look) -> Choice | None:
        """What was looked at as a choice; None where nothing is gained."""
        lost = {self.owner(v) for v in look.extra} - {self.owner(v) for v in self.kept}
        gain = sum(map(self.size, owners)) - sum(map(self.size, lost))
        earlier = sum(map(self.size, look.earlier))
        if not self.slack:
            gain -= earlier
        if gain <= 0 or earlier > max(self.slack, 1) * sum(map(self.size, owners)):
            return None
        nodes = tuple(sorted(look.nodes, key=self.order.__getitem__))
        dropped, kept = (tuple(sorted(str(v.name) for v in found)) for found in (look.members, look.extra))
        seconds = sum(self._seconds(n) for n in nodes if n not in self.at)
        return Choice(dropped, kept, nodes, look.at, gain, seconds)

    def look(
        self,
        owners: tuple[ir.Value, ...],
        deep: bool,
        may_run: Callable[[ir.Node], bool] = anything,
        most: int = _MOST,
    ) -> Look | None:
        """What has to run again for all values that share the memory of some; None where it cannot, or is too much.

        Args:
            owners: the values whose memory it is.
            deep: also what is expensive runs again; else what it gave is saved instead.
            may_run: which nodes may run again; what the others gave is saved instead.
            most: how many nodes may run again.
        """
        members = [v for owner in owners for v in self.groups[owner]]
        at = min(self.read[v] for v in members)
        kept, nodes, extra = self.kept.difference(members), dict[ir.Node, None](), dict[ir.Value, None]()
        waiting = list(members)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value in kept or node is None or node in nodes or self.at.get(node, at + 1) <= at or value in extra:
                continue
            is_cheap = deep or value in members or node in self.at or Trait.EXPENSIVE not in traits_of(node)
            if not can_run_again(node, value, kept) or not is_cheap or not may_run(node):
                if value in members or self.owner(value) in owners:
                    return None
                extra[value] = None
                continue
            nodes[node] = None
            if len(nodes) > most:
                return None
            waiting += operands(node)
        earlier = {self.owner(v) for n in nodes if n in self.at for v in n.outputs} & self.dropped
        return Look(members, nodes, extra, at, frozenset(earlier))

    def size(self, value: ir.Value) -> int:
        """The bytes of a value; none where they are not known."""
        return 0 if shapes.data_of(value) is not None else bytes_of(value, self.sizes) or 0

    def _seconds(self, node: ir.Node) -> float:
        if node.outputs[0] in self.owners:
            return 0.0
        moved = sum(self.size(v) for v in (*operands(node), *node.outputs))
        try:
            count = size_of(as_dim(count_of(node)), self.sizes) if Trait.EXPENSIVE in traits_of(node) else 0
        except (GraphError, ShapeError, KeyError):
            count = 0
        return moved / self.bandwidth + count / self.flops


def operands(node: ir.Node) -> list[ir.Value]:
    """What a node reads beside sizes where it runs again; of Dropout also the mask that was drawn."""
    read = [v for v in node.inputs if v is not None and shapes.data_of(v) is None]
    return [read[0], node.outputs[1], read[1]] if node.op_type == "Dropout" else read


def can_run_again(node: ir.Node, value: ir.Value, kept: Collection[ir.Value]) -> bool:
    """Whether a node gives the same value again: what it drew at random has to be kept."""
    if node.op_type == "Dropout" and node.domain == "":
        drawn = len(node.outputs) == 2 and len(node.inputs) > 2 and node.inputs[1] is not None
        return drawn and value is node.outputs[0] and node.outputs[1] in kept
    return not (Trait.RANDOM | Trait.EFFECT) & traits_of(node) and not bodies_of(node)


def recomputed(training: TrainingGraph, plan: Plan, chosen: Iterable[Choice]) -> TrainingGraph:
    """The graph, with copies of nodes in the backward pass that compute values again right before they are needed.

    Args:
        training: the graph; it is not changed.
        plan: made of it.
        chosen: what is computed again.
    """
    saved, dropped = {*plan.saved}, set[str]()
    for choice in chosen:
        dropped |= {*choice.dropped}
        saved |= {*choice.kept}
    model = ir.Model(training.model.graph.clone(), ir_version=training.model.ir_version)
    again = _Again(model.graph, saved - dropped)
    for node in list(model.graph):
        if is_backward(node):
            for index, value in enumerate(node.inputs):
                if value is not None and value.name in dropped:
                    node.replace_input_with(index, again.value(value, node))
    return dataclasses.replace(training, model=model)


class _Again:
    """Copies of the nodes of a forward pass in its backward pass.

    Args:
        graph: the training graph.
        saved: names of the values that are saved.
    """

    def __init__(self, graph: ir.Graph, saved: Collection[str]) -> None:
        self.graph, self.saved = graph, saved
        self.names = {str(v.name) for n in graph for v in n.outputs}
        self.node_names = {n.name for n in graph}
        self.copies: dict[ir.Value, ir.Value] = {}

    def value(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """A value as the backward pass has it: saved, or computed again before a node."""
        node = value.producer()
        if value in self.copies:
            return self.copies[value]
        if value.name in self.saved or node is None or shapes.data_of(value) is not None:
            return value
        inputs = [None if v is None else self.value(v, before) for v in node.inputs]
        if node.op_type == "Dropout" and node.domain == "":
            copy = ir.Node(DOMAIN, "DropoutGrad", [inputs[0], node.outputs[1], inputs[1]], num_outputs=1)
        else:
            stated = list(node.attributes.values())
            copy = ir.Node(node.domain, node.op_type, inputs, attributes=stated, num_outputs=len(node.outputs))
        copy.name = free_name(f"{node.name or node.outputs[0].name}{SUFFIX}", self.node_names)
        self.node_names.add(copy.name)
        copy.metadata_props.update(node.metadata_props)
        copy.meta.update(node.meta)
        copy.meta[BACKWARD] = copy.meta[RECOMPUTED] = True
        for old, new in zip(node.outputs, copy.outputs, strict=False):
            self._describe(old, new)
        self.graph.insert_before(before, copy)
        return self.copies[value]

    def _describe(self, old: ir.Value, new: ir.Value) -> None:
        if old.name:
            new.name = free_name(f"{old.name}{SUFFIX}", self.names)
            self.names.add(new.name)
        new.type, new.shape = old.type, old.shape
        new.meta.update(old.meta)
        self.copies[old] = new
