"""Slices: several in a row are one, those that take a tensor apart are one Split, those that undo a Concat go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import replace, rewrite
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, is_backward

_END = 2**31 - 1  # from here on an end means the end of the axis


class SlicesPass(ir.passes.InPlacePass):
    """Slices, Gathers and Splits at known places read what they can from where it comes, with as few nodes as can be.

    * A Gather of rows that follow each other, by constant indices or by a Range, is a Slice.
    * A Slice of a Slice is one.
    * What a Slice or a Split takes out of a Concat is what the Concat was given.
    * Gathers of one element and Slices that take an axis apart are one Split: its gradient is one Concat.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            modified |= _gather_to_slice(node) or _join(node) or _undo_concat(model.graph, node)
        for value in [*model.graph.inputs, *(v for n in model.graph for v in n.outputs)]:
            modified |= _to_split(model.graph, value)
        return ir.passes.PassResult(model, modified)


class _Cut(NamedTuple):
    """What a Slice takes along one axis, with a positive step."""

    start: int
    end: int
    step: int


def _is(node: ir.Node | None, *op_types: str) -> bool:
    return node is not None and node.domain == "" and node.op_type in op_types


def _cuts(node: ir.Node) -> dict[int, _Cut] | None:
    """What a Slice takes, by axis; None where that is not constant."""
    x = node.inputs[0]
    dims = None if x is None else shapes.dims_of(x)
    parts = [shapes.constant_of(shapes.operand(node, i)) for i in (1, 2, 3, 4)]
    starts, ends, axes, steps = (None if p is None else [int(i) for i in p.reshape(-1)] for p in parts)
    if dims is None or starts is None or ends is None:
        return None
    if any(p is None and shapes.operand(node, i) is not None for i, p in ((3, axes), (4, steps))):
        return None
    axes = list(range(len(starts))) if axes is None else [a % len(dims) for a in axes]
    steps = [1] * len(starts) if steps is None else steps
    if len(set(axes)) < len(axes) or any(step <= 0 for step in steps):
        return None
    return {a: _absolute(_Cut(*cut), dims[a]) for a, *cut in zip(axes, starts, ends, steps, strict=True)}


def _absolute(cut: _Cut, dim: shapes.Dim) -> _Cut:
    """The same cut counted from the first element, where the size of the axis is known."""
    if not isinstance(dim, int):
        return cut
    taken = range(dim)[slice(*cut)]
    return _Cut(taken.start, max(taken.stop, taken.start), taken.step)


def _join(node: ir.Node) -> bool:
    """A Slice of a Slice that nothing else reads is one: on another axis, or of what the other left."""
    before = node.inputs[0].producer() if _is(node, "Slice") and node.inputs[0] is not None else None
    if before is None or not _is(before, "Slice") or before.inputs[0] is None or node.graph is None:
        return False
    middle = before.outputs[0]
    if middle.is_graph_output() or len(middle.uses()) > 1 or is_backward(node) != is_backward(before):
        return False
    first, second = _cuts(before), _cuts(node)
    if first is None or second is None:
        return False
    dims = shapes.known_dims(before.inputs[0])
    cuts = dict(first)
    for axis, cut in second.items():
        joined = _within(first[axis], cut, dims[axis]) if axis in first else cut
        if joined is None:
            return False
        cuts[axis] = joined
    _become_slice(node, before.inputs[0], cuts)
    return True


def _within(first: _Cut, second: _Cut, dim: shapes.Dim) -> _Cut | None:
    """One cut that takes what the second takes of what the first took; None where that depends on the size."""
    if isinstance(dim, int):
        taken = range(dim)[slice(*first)][slice(*second)]
        return _Cut(taken.start, taken.stop, taken.step) if taken else _Cut(0, 0, 1)
    if first.step != 1 or second.step != 1 or first.start < 0 or second.start < 0:
        return None
    start, open_end = first.start + second.start, first.end >= _END
    if second.end >= _END:
        return _Cut(start, first.end, 1)
    if second.end < 0:  # counted from the end, which must be counted from the end itself
        from_end = second.end + (0 if open_end else first.end)
        return _Cut(start, from_end, 1) if open_end or first.end < 0 else None
    if first.end < 0:
        return None
    end = first.start + second.end
    return _Cut(start, end if open_end else min(first.end, end), 1)


def _become_slice(node: ir.Node, x: ir.Value, cuts: dict[int, _Cut]) -> None:
    op = Builder(node.graph)  # type: ignore[arg-type]
    axes = sorted(cuts)
    starts, ends, steps = (op.ints(*(cuts[a][i] for a in axes)) for i in range(3))
    stepped = any(c.step != 1 for c in cuts.values())
    rewrite(node, "Slice", [x, starts, ends, op.ints(*axes), *([steps] if stepped else [])])


def _gather_to_slice(node: ir.Node) -> bool:
    """A Gather of elements in a row, all of them known to be there, is a Slice."""
    table = node.domain == DOMAIN and node.op_type == "Embedding" and shapes.attribute(node, "padding_idx", -1) == -1
    if not table and not _is(node, "Gather"):
        return False
    x, indices = node.inputs[:2]
    if x is None or shapes.dims_of(x) is None or shapes.data_of(x) is not None or node.graph is None:
        return False
    axis = 0 if table else shapes.attribute(node, "axis", 0) % shapes.rank(x)
    cut = _row(indices, shapes.known_dims(x)[axis])
    if cut is None:
        return False
    _become_slice(node, x, {axis: cut})
    return True


def _row(indices: ir.Value | None, dim: shapes.Dim) -> _Cut | None:
    """The cut that takes the same as indices that follow each other at equal distances."""
    maker = None if indices is None else indices.producer()
    content = shapes.constant_of(indices)
    if content is not None and content.ndim == 1 and content.size and isinstance(dim, int):
        places = [int(i) + dim * (i < 0) for i in content]
        step = places[1] - places[0] if len(places) > 1 else 1
        if step > 0 and places == list(range(places[0], places[-1] + 1, step)) and 0 <= places[0] <= places[-1] < dim:
            return _Cut(places[0], places[-1] + 1, step)
        return None
    if maker is None or not _is(maker, "Range"):
        return None
    start, limit, step = (shapes.data_of(v) for v in maker.inputs)
    if not isinstance(start, int) or not isinstance(step, int) or start < 0 or step <= 0:
        return None
    if isinstance(limit, int) and isinstance(dim, int) and start <= limit <= dim:
        return _Cut(start, limit, step)
    return _Cut(start, 2**63 - 1, step) if limit == dim and shapes.are_known((dim,)) else None


def _undo_concat(graph: ir.Graph, node: ir.Node) -> bool:
    """Outputs of a Slice or a Split of a Concat that are one of its inputs are read from there."""
    before = node.inputs[0].producer() if _is(node, "Slice", "Split") and node.inputs[0] is not None else None
    if before is None or not _is(before, "Concat") or is_backward(node) != is_backward(before):
        return False
    joined = before.outputs[0]
    rank = len(shapes.dims_of(joined) or ())
    if not rank or any(v is None or shapes.dims_of(v) is None for v in before.inputs):
        return False
    axis = shapes.attribute(before, "axis") % rank
    parts = [v for v in before.inputs if v is not None]
    places = dict(zip(_intervals(shapes.known_dims(v)[axis] for v in parts), parts, strict=True))
    modified = False
    for value, place in zip(node.outputs, _taken(node, axis, shapes.known_dims(joined)[axis]), strict=True):
        part = places.get(place) if place is not None and shapes.are_known(place) else None
        if part is not None and value.uses() and not value.is_graph_output():
            value.replace_all_uses_with(part)
            modified = True
    return modified


_Interval = tuple[shapes.Dim, shapes.Dim]


def _intervals(sizes: Iterable[shapes.Dim]) -> list[_Interval]:
    """Where each of the parts in a row begins and ends; none where a size is not known."""
    found: list[_Interval] = []
    begin: shapes.Dim = 0
    for size in sizes:
        if not shapes.are_known((size,)):
            begin = ir.SymbolicDim(None)
        end = begin if not shapes.are_known((begin,)) else shapes.simplify(begin + size)  # type: ignore[operator]
        found.append((begin, end))
        begin = end
    return found


def _taken(node: ir.Node, axis: int, total: shapes.Dim) -> list[_Interval | None]:
    """Where on an axis the outputs of a Slice or a Split lie; None for a Slice that takes something else."""
    if node.op_type == "Split":
        if shapes.attribute(node, "axis", 0) % shapes.rank(node.outputs[0]) != axis:
            return [None] * len(node.outputs)
        return [*_intervals(shapes.known_dims(v)[axis] for v in node.outputs)]
    starts, ends = (shapes.data_of(node.inputs[i]) for i in (1, 2))
    axes, steps = shapes.constant_of(shapes.operand(node, 3)), shapes.data_of(shapes.operand(node, 4))
    single = isinstance(starts, tuple) and isinstance(ends, tuple) and len(starts) == 1
    if not single or axes is None or int(axes.reshape(-1)[0]) % shapes.rank(node.outputs[0]) != axis:
        return [None]
    if shapes.operand(node, 4) is not None and steps != (1,):
        return [None]
    return [(_from_begin(starts[0], total), _from_begin(ends[0], total))]  # type: ignore[index]


def _from_begin(place: shapes.Dim, total: shapes.Dim) -> shapes.Dim:
    if not isinstance(place, int):
        return place
    if place < 0:
        return shapes.simplify(total + place)  # type: ignore[operator]
    return total if place >= _END or (isinstance(total, int) and place > total) else place


def _to_split(graph: ir.Graph, x: ir.Value) -> bool:
    """Make the readers of a value that take one of its axes apart outputs of one Split."""
    dims = shapes.dims_of(x)
    if dims is None or len(x.uses()) < 2 or shapes.data_of(x) is not None or shapes.constant_of(x) is not None:
        return False
    readers: dict[tuple[int, bool], dict[ir.Node, tuple[int, int]]] = {}
    for use in x.uses():
        found = _piece(use.node, dims) if use.idx == 0 else None
        if found is not None:
            axis, begin, end = found
            readers.setdefault((axis, is_backward(use.node)), {})[use.node] = (begin, end)
    done = [_split(graph, x, axis, pieces) for (axis, _), pieces in sorted(readers.items(), key=lambda r: r[0])]
    return any(done)


def _piece(node: ir.Node, dims: shapes.Dims) -> tuple[int, int, int] | None:
    """The axis that a Gather of one element or a Slice takes a part of, and where the part begins and ends."""
    if _is(node, "Gather"):
        index, axis = shapes.constant_of(node.inputs[1]), shapes.attribute(node, "axis", 0) % len(dims)
        size = dims[axis]
        if index is None or index.size != 1 or index.ndim > 1 or not isinstance(size, int):
            return None
        place = int(index.reshape(-1)[0])
        return axis, place % size, place % size + 1
    cuts = _cuts(node) if _is(node, "Slice") else None
    if cuts is None or len(cuts) != 1:
        return None
    ((axis, cut),) = cuts.items()
    return (axis, cut.start, cut.end) if cut.step == 1 and isinstance(dims[axis], int) else None


def _split(graph: ir.Graph, x: ir.Value, axis: int, pieces: dict[ir.Node, tuple[int, int]]) -> bool:
    places = sorted(set(pieces.values()))
    size = shapes.known_dims(x)[axis]
    begins, ends = [b for b, _ in places], [e for _, e in places]
    if len(places) < 2 or begins != [0, *ends[:-1]] or ends[-1] != size or any(b == e for b, e in places):
        return False
    nodes = [node for node in graph if node in pieces]
    op = Builder(graph, before=nodes[0], backward=is_backward(nodes[0]))
    op.metadata = dict(nodes[0].metadata_props)
    parts = op.Split(x, op.ints(*(e - b for b, e in places)), axis=axis, outputs=len(places))
    made = dict(zip(places, parts, strict=True))
    for node in nodes:
        op.before, op.metadata = node, dict(node.metadata_props)
        part = made[pieces[node]]
        dropped = shapes.rank(node.outputs[0]) < shapes.rank(x)
        _give(graph, node, op.Squeeze(part, op.ints(axis)) if dropped else part)
    return True


def _give(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Let a value take the place and the name of a node's output; one that is a graph output already gives a copy."""
    old = node.outputs[0]
    if value.is_graph_output():
        replace(graph, node, [value])
        return
    name = old.name
    old.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    old.name, value.name = None, name
