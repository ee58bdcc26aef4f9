"""How many bytes of values are alive at once in a plan: an estimate, without kernels' workspace."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import bytes_of
from onnxtrain.ir.graphs import Plan, TrainingGraph
from onnxtrain.ir.traits import Trait, traits_of


def owners(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.Value]:
    """For each value that is a view the value whose memory it shares.

    A view of another shape of what does not lie in order in memory is a copy.
    """
    found: dict[ir.Value, ir.Value] = {}
    mixed: set[ir.Value] = set()  # views whose elements do not lie in order
    for node in nodes:
        source = node.inputs[0] if node.inputs else None
        if source is None or Trait.VIEW not in traits_of(node) or shapes.data_of(node.outputs[0]) is not None:
            continue
        if node.op_type in ("Reshape", "Flatten") and source in mixed:
            continue
        for value in node.outputs:
            found[value] = found.get(source, source)
            if node.op_type in _MIXING or source in mixed:
                mixed.add(value)
    return found


_MIXING = ("Transpose", "Expand", "Slice", "Split")


def peak(plan: Plan, sizes: Mapping[str, int]) -> int:
    """Most bytes alive at once, of what a step makes and what it is given as gradients.

    Args:
        plan: forward and backward.
        sizes: of named dimensions; values of other sizes count nothing.
    """
    return max((moment.most for moment in course(plan, sizes)), default=0)


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is alive while a node runs.

    Args:
        node: of one of the two passes.
        before: bytes before it.
        most: bytes with what it makes.
    """

    node: ir.Node
    before: int
    most: int


def course(plan: Plan, sizes: Mapping[str, int]) -> list[Moment]:
    """What is alive as a step goes on, forward and backward.

    Args:
        plan: forward and backward.
        sizes: of named dimensions; values of other sizes count nothing.
    """
    kept = {*plan.signature.outputs, *plan.signature.buffer_updates.values()}
    forward = _Walk(plan.forward.graph, sizes, {*kept, *plan.saved})
    forward.run(dict.fromkeys(plan.forward.graph.inputs, 0))
    if plan.backward is None:
        return forward.seen
    given = {}
    for value in plan.backward.graph.inputs:
        saved = forward.named.get(str(value.name))
        given[value] = (bytes_of(value, sizes) or 0) if saved is None else forward.alive.get(forward.owner(saved), 0)
    backward = _Walk(plan.backward.graph, sizes, set(plan.gradients.values()))
    shown = {forward.owner(forward.named[n]) for n in kept if n in forward.named}
    backward.now = sum(forward.alive[v] for v in shown if v in forward.alive)
    again = {v for v in given if (made := forward.named.get(str(v.name))) and forward.owner(made) in shown}
    backward.run(given | dict.fromkeys(again, 0))
    return forward.seen + backward.seen


def peak_of_whole(training: TrainingGraph, sizes: Mapping[str, int]) -> int:
    """Most bytes alive at once, where forward and backward run as one graph in its order.

    Args:
        training: the graph.
        sizes: of named dimensions; values of other sizes count nothing.
    """
    signature = training.signature
    kept = {*signature.outputs, *signature.buffer_updates.values(), *training.gradients.values()}
    walk = _Walk(training.model.graph, sizes, kept)
    walk.run(dict.fromkeys(training.model.graph.inputs, 0))
    return max((moment.most for moment in walk.seen), default=0)


class _Walk:
    """One pass in order, with what is alive.

    Args:
        graph: the pass.
        sizes: of named dimensions.
        kept: names of the values that outlive it.
    """

    def __init__(self, graph: ir.Graph, sizes: Mapping[str, int], kept: Collection[str]) -> None:
        self.sizes = sizes
        self.nodes = [n for n in graph if any(shapes.data_of(v) is None for v in n.outputs)]  # the others do not run
        self._owners = owners(self.nodes)
        self.named = {str(v.name): v for n in self.nodes for v in n.outputs} | {str(v.name): v for v in graph.inputs}
        self.alive: dict[ir.Value, int] = {}
        self.now = 0
        self.seen: list[Moment] = []
        last = {self.owner(v): n for n in self.nodes for v in (*n.outputs, *n.inputs) if v is not None}
        held = {self.owner(v) for name, v in self.named.items() if name in kept}
        self._dying: dict[ir.Node, list[ir.Value]] = {}
        for value, node in last.items():
            if value not in held:
                self._dying.setdefault(node, []).append(value)

    def owner(self, value: ir.Value) -> ir.Value:
        """The value whose memory a value has."""
        return self._owners.get(value, value)

    def run(self, given: Mapping[ir.Value, int]) -> None:
        """Walk from the bytes of the inputs."""
        self.alive |= given
        self.now += sum(given.values())
        for node in self.nodes:
            dying, before = self._dying.get(node, ()), self.now
            self._make(node, dying)
            self.seen.append(Moment(node, before, max(before, self.now)))
            for value in dying:
                self.now -= self.alive.pop(value, 0)

    def _make(self, node: ir.Node, dying: Collection[ir.Value]) -> None:
        if node.op_type == "Constant":
            return
        for value in node.outputs:
            if value in self._owners or shapes.data_of(value) is not None:
                continue
            size = bytes_of(value, self.sizes) or 0
            if Trait.ELEMENTWISE in traits_of(node):  # it writes over what it reads where that is no longer needed
                over = next((v for v in dying if v in node.inputs and self.alive.get(v) == size), None)
                if over is not None:
                    self.now -= self.alive.pop(over)
            self.alive[value] = size
            self.now += size
