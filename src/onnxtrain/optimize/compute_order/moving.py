"""The change of the graph: nodes are given parts, and nodes that selected go."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.compute_order.demand import Demand
from onnxtrain.optimize.compute_order.selections import Entry, Part, Selection
from onnxtrain.optimize.compute_order.taking import Taker, part_of_union


def sources(graph: ir.Graph, selection: Selection, demand: Demand) -> tuple[ir.Node | None, list[ir.Node]]:
    """The first node that will read a selection's positions, and the nodes after it that compute them, in order."""
    order = {node: number for number, node in enumerate(graph)}
    readers = [
        order[n] for n, made in demand.moves.items() if any(p.selection == selection for p in made.parts.values())
    ]
    if selection.index is None or not readers:
        return None, []
    first, found = min(readers), set[ir.Node]()
    waiting = [selection.index.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or order.get(node, -1) < first:
            continue
        found.add(node)
        waiting += [v.producer() for v in node.inputs if v is not None]
        made = demand.moves.get(node)
        waiting += [p.selection.index.producer() for p in (made.parts.values() if made else ()) if p.selection.index]
    return list(graph)[first], sorted(found, key=order.__getitem__)


def can_come_first(graph: ir.Graph, entry: Entry, demand: Demand) -> bool:
    """Whether the positions of a selection may be computed before what is selected: random numbers keep their order."""
    _, found = sources(graph, entry.part.selection, demand)
    return not any(traits_of(n) & (Trait.RANDOM | Trait.EFFECT) for n in found)


class Mover:
    """Does what a demand says.

    Args:
        graph: the graph, changed by ``run``.
        demand: what is to be done.
    """

    def __init__(self, graph: ir.Graph, demand: Demand) -> None:
        self.graph, self.demand, self.op = graph, demand, Taker(graph)
        self.read = {node: tuple(node.inputs) for node in graph}  # before anything changes
        self.taken: dict[tuple[ir.Value, Part], ir.Value] = {}
        self.lines = {e.part.selection: e.node.metadata_props for e in demand.entries.values()}

    def run(self) -> None:
        """Change the graph."""
        for selection in {e.part.selection: None for e in self.demand.finished()}:
            first, late = sources(self.graph, selection, self.demand)
            for node in late:
                assert first is not None
                self.graph.remove(node)
                self.graph.insert_before(first, node)
        finished = {e.node: e for e in self.demand.finished()}
        for node in list(self.graph):
            if node in self.demand.moves:
                self._shrink(node)
            elif node in finished:
                self._finish(finished[node])

    def _shrink(self, node: ir.Node) -> None:
        made = self.demand.moves[node]
        part = self.demand.parts[node.outputs[0]]
        for index, wanted in made.parts.items():
            node.replace_input_with(index, self._take(node, index, wanted))
        if made.edit is not None:
            self._write_at(node, node.metadata_props)
            made.edit(self.op, node)
        rank = shapes.rank(node.outputs[0])
        for value in node.outputs:
            dims = shapes.dims_of(value)
            value.shape = None if dims is None or len(dims) != rank else ir.Shape(part.of(dims))
            shapes.forget_data(value)
        shapes.infer(node)

    def _finish(self, entry: Entry) -> None:
        """Take the axis away where the node did so; else nothing is left to do."""
        node, taken = entry.node, self._take(entry.node, 0, entry.part)
        operands = [taken, self.op.ints(entry.part.place.axis)] if entry.squeezed else [taken]
        node.domain, node.op_type = "", "Squeeze" if entry.squeezed else "Identity"
        node.attributes.clear()
        node.resize_inputs(len(operands))
        for index, value in enumerate(operands):
            node.replace_input_with(index, value)

    def _take(self, node: ir.Node, index: int, part: Part) -> ir.Value:
        """The part of an input: what its producer gives, or a selection from that, made where it is first needed."""
        value = node.inputs[index]
        assert value is not None
        given = self.demand.parts.get(self.read[node][index])  # type: ignore[arg-type]
        if given == part:
            return value
        if (value, part) not in self.taken:
            self._write_at(node, self.lines.get(part.selection, node.metadata_props))
            wanted = part if given is None else part_of_union(part, given)
            self.taken[value, part] = taken = self.op.take(value, wanted)
            if not wanted.spread:
                taken.shape = ir.Shape(wanted.of(shapes.known_dims(value)))
        return self.taken[value, part]

    def _write_at(self, node: ir.Node, metadata: dict[str, str]) -> None:
        self.op.before, self.op.metadata = node, dict(metadata)
