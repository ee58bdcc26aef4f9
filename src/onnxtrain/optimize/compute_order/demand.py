"""Which part of each value is read: from the nodes that select upwards, as far as it pays.

A node gives only a part of its output where all that read it read that part; then it reads parts of its own inputs. A
value that anything else reads, the user included, is computed in full, and the selection stays below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.compute_order.attention import call_of
from onnxtrain.optimize.compute_order.rules import VIEWS, Move, move
from onnxtrain.optimize.compute_order.selections import FEW, Entry, Part, entry_of, positions
from onnxtrain.optimize.compute_order.taking import can_take


@dataclasses.dataclass
class Demand:
    """What is to be done.

    Args:
        entries: the nodes that select.
        moves: how each node that gives only a part of its outputs reads its inputs.
        parts: the part of each value that such a node gives.
    """

    entries: dict[ir.Node, Entry]
    moves: dict[ir.Node, Move] = dataclasses.field(default_factory=dict)
    parts: dict[ir.Value, Part] = dataclasses.field(default_factory=dict)

    def finished(self) -> list[Entry]:
        """The entries whose selection moves."""
        return [e for e in self.entries.values() if e.node.inputs[0] in self.parts]


def find(graph: ir.Graph, ends: set[ir.Node], allowed: Callable[[ir.Node], bool]) -> Demand:
    """The parts that are read of a graph's values.

    Args:
        graph: the graph.
        ends: nodes whose selection is known to stay where it is.
        allowed: whether a node may be given less to do.
    """
    entries = {n: e for n in graph if n not in ends and (e := entry_of(n)) is not None}
    kept: set[ir.Node] = set()
    while True:
        demand = Demand(entries)
        for node in reversed(list(graph)):
            if node not in entries and node not in kept and allowed(node):
                _look_at(node, demand)
        lost = _without_use(graph, demand)
        if not lost:
            return demand
        kept |= lost


def _look_at(node: ir.Node, demand: Demand) -> None:
    """Decide whether a node gives a part of its outputs, once that is decided of all nodes below it."""
    read = [v for v in node.outputs if v.uses() or v.is_graph_output()]
    found = {part for v in read if (part := _read_of(v, demand)) is not None}
    if not read or len(found) != 1 or any(_read_of(v, demand) is None for v in read):
        return
    if len(read) > 1 and node.op_type != "Split":
        return
    (part,) = found
    made = move(node, part)
    if made is not None:
        demand.moves[node] = made
        demand.parts.update(dict.fromkeys(node.outputs, part))


def _read_of(value: ir.Value, demand: Demand) -> Part | None:
    """The part of a value that is read, None for all of it."""
    if value.is_graph_output() or value.shape is None:
        return None
    found: set[Part] = set()
    for reader, index in value.uses():
        part = _of_reader(reader, index, demand)
        if part is None and reader.op_type == "Shape":
            continue
        if part is None or part.spread:
            return None
        found.add(part)
    one = found.pop() if len(found) == 1 else _union(found)
    return None if one is None or any(_measures(reader, one) for reader, _ in value.uses()) else one


def _measures(reader: ir.Node, part: Part) -> bool:
    """Whether a node reads the size of an axis of which only a part would be left."""
    if reader.op_type != "Shape" or reader.inputs[0] is None:
        return False
    axes = range(shapes.rank(reader.inputs[0]))
    return part.place.axis in axes[shapes.attribute(reader, "start", 0) : shapes.attribute(reader, "end")]


def _of_reader(reader: ir.Node, index: int, demand: Demand) -> Part | None:
    if index == 0 and reader in demand.entries:
        return demand.entries[reader].part
    made = demand.moves.get(reader)
    return None if made is None else made.parts.get(index)


def _union(found: set[Part]) -> Part | None:
    """One part that holds several, where that is still little of the axis."""
    one = next(iter(found), None)
    if one is None or any(p.selection.kind != "positions" or p.place != one.place or p.place.merged for p in found):
        return None
    content = sorted({position for p in found for position in p.selection.content})
    size = one.selection.size
    few = 2 * len(content) <= size if isinstance(size, int) else len(content) <= FEW
    largest = max(found, key=lambda p: len(p.selection.content))
    if set(largest.selection.content) == set(content):
        return largest
    selection = positions(content, size) if few else None
    return None if selection is None else dataclasses.replace(one, selection=selection)


def _without_use(graph: ir.Graph, demand: Demand) -> set[ir.Node]:
    """Let selections stay below views that they would only pass; returns nodes that cannot be given what they need."""
    lost = set()
    for node in graph:
        made = demand.moves.get(node)
        if made is None:
            continue
        unmoved = {i: p for i, p in made.parts.items() if node.inputs[i] not in demand.parts}
        (part,) = {demand.parts[v] for v in node.outputs if v in demand.parts}
        view = node.op_type in VIEWS and node.domain == "" and unmoved and len(unmoved) == len(made.parts)
        if view and (part.plain or not any(p.plain for p in unmoved.values())):
            del demand.moves[node]
            for value in node.outputs:
                del demand.parts[value]
        elif not all(can_take(node.inputs[i], p) for i, p in unmoved.items()):  # type: ignore[arg-type]
            lost.add(node)
    return lost


def draws(node: ir.Node) -> bool:
    """Whether a node draws random numbers, or might."""
    if node.op_type == "Dropout":
        training, ratio = (shapes.constant_of(shapes.operand(node, i)) for i in (2, 1))
        off = shapes.operand(node, 2) is None or (training is not None and not training)
        return not off and (ratio is None or bool(ratio != 0))
    if node.op_type == "ATen":
        call = call_of(node)
        return call is None or bool(call.get("dropout_p"))
    return Trait.RANDOM in traits_of(node)
