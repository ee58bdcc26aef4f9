"""What is taken of a value's axis, and the nodes that take it.

A selection keeps its axis while it moves; where a node took the axis away, a Squeeze does so at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Dim, Dims

FEW = 16  # positions that are fewer than an axis of a size that is not known
_END = 2**62  # numbers from here on say "to the end" of a Slice


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is taken of one axis.

    Args:
        kind: ``"positions"`` (known ones), ``"slice"`` (of an axis whose size is not known), ``"index"`` (a vector
            computed at run time), ``"rows"`` (the same by ShrunkenGather) or ``"batched"`` (a matrix: positions for
            each entry of the batch).
        content: the positions, or start, end and step.
        count: how many positions are taken (of each entry of the batch).
        size: the axis's size.
        index: the vector or matrix of positions, or the scalar that is one position.
    """

    kind: str
    content: tuple[int, ...]
    count: Dim
    size: Dim
    index: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """An axis, or one of the axes that it is the flattening of.

    Args:
        axis: the axis of the value.
        parts: the axes that it merges; one where it merges none.
        part: which of them is meant.
    """

    axis: int
    parts: Dims
    part: int = 0

    @property
    def merged(self) -> bool:
        """Whether the axis is the flattening of several."""
        return len(self.parts) > 1

    def at(self, axis: int) -> Place:
        """The same on another axis."""
        return dataclasses.replace(self, axis=axis)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a value that is read: a selection at its place.

    Args:
        selection: what is taken.
        place: where.
        batch: for a batched selection, the axis of the batch. None where the value has no such axis: then taking the
            part gives it one, as its first of ``rank`` axes.
        rank: the rank of the result in that case.
    """

    selection: Selection
    place: Place
    batch: Place | None = None
    rank: int = 0

    @property
    def axes(self) -> frozenset[int]:
        """The axes that an operator must not mix."""
        return frozenset(p.axis for p in (self.place, self.batch) if p is not None)

    @property
    def plain(self) -> bool:
        """Whether one node takes the part."""
        return not self.place.merged and (self.batch is None or (self.batch.axis, self.place.axis) == (0, 1))

    @property
    def spread(self) -> bool:
        """Whether taking the part gives the value an axis for the batch."""
        return self.selection.kind == "batched" and self.batch is None

    def moved(self, place: Place, batch: Place | None) -> Part:
        """The same selection elsewhere."""
        return Part(self.selection, place, batch)

    def of(self, dims: Dims) -> Dims:
        """The dimensions that are left of those of a value."""
        parts = tuple(self.selection.count if i == self.place.part else d for i, d in enumerate(self.place.parts))
        return tuple(shapes.product(parts) if i == self.place.axis else d for i, d in enumerate(dims))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A node that selects.

    Args:
        node: the node.
        part: what it reads of its first input.
        squeezed: whether its output lacks the axis.
    """

    node: ir.Node
    part: Part
    squeezed: bool


def entry_of(node: ir.Node) -> Entry | None:
    """The selection that a node is, or None where it is none or nothing can be said of it."""
    data = node.inputs[0] if node.inputs else None
    dims = None if data is None else shapes.dims_of(data)
    if data is None or dims is None or shapes.data_of(data) is not None or data.producer() is None:
        return None
    if node.domain == DOMAIN:
        return _rows(node, dims) if node.op_type == "ShrunkenGather" else None
    rule = {"Gather": _gather, "Slice": _slice, "GatherND": _gather_nd}.get(node.op_type)
    entry = rule(node, dims) if rule is not None and node.domain == "" else None
    return entry if entry is not None and _fewer(entry.part.selection) else None


def _fewer(selection: Selection) -> bool:
    """Whether so much of the axis is left out that taking the part first pays."""
    count, size = selection.count, selection.size
    if isinstance(size, int) and isinstance(count, int):
        return 0 < 4 * count <= 3 * size
    if selection.kind == "rows":
        return True
    most = _most(*selection.content) if selection.kind == "slice" else count
    return isinstance(most, int) and most <= FEW


def positions(content: Sequence[int], size: Dim) -> Selection | None:
    """A selection of known positions; None where one is outside of the axis."""
    if isinstance(size, int):
        if any(not -size <= p < size for p in content):
            return None
        content = [p % size for p in content]
    return Selection("positions", tuple(content), len(content), size)


def _gather(node: ir.Node, dims: Dims) -> Entry | None:
    axis = shapes.attribute(node, "axis", 0) % len(dims)
    index, size = node.inputs[1], dims[axis]
    shape = None if index is None else shapes.dims_of(index)
    if index is None or shape is None or len(shape) > 1:
        return None
    known = shapes.constant_of(index)
    count = shape[0] if shape else 1
    if known is not None:
        selection = positions(known.reshape(-1).tolist(), size)
    else:
        selection = Selection("index", (), count, size, index)
    return None if selection is None else Entry(node, Part(selection, Place(axis, (size,))), not shape)


def _rows(node: ir.Node, dims: Dims) -> Entry | None:
    index = node.inputs[1]
    count = None if index is None else shapes.dims_of(index)
    if index is None or count is None or len(count) != 1:
        return None
    return Entry(node, Part(Selection("rows", (), count[0], dims[0], index), Place(0, dims[:1])), False)


def slice_of(node: ir.Node) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """Starts, ends, axes and steps of a Slice, the axes not negative; None where they are not known."""
    given = [shapes.constant_of(shapes.operand(node, i)) for i in range(1, 5)]
    data = node.inputs[0]
    missing = [i for i in range(4) if shapes.operand(node, i + 1) is not None and given[i] is None]
    if missing or given[0] is None or given[1] is None or data is None or data.shape is None:
        return None
    starts, ends = given[0].tolist(), given[1].tolist()
    axes = given[2].tolist() if given[2] is not None else list(range(len(starts)))
    steps = given[3].tolist() if given[3] is not None else [1] * len(starts)
    return starts, ends, [a % len(data.shape) for a in axes], steps


def _slice(node: ir.Node, dims: Dims) -> Entry | None:
    found = slice_of(node)
    if found is None or len(found[0]) != 1 or shapes.rank(node.outputs[0]) != len(dims):
        return None
    (start,), (end,), (axis,), (step,) = found
    size = dims[axis]
    if isinstance(size, int):
        selection = positions(range(size)[start:end:step], size)
    else:
        count = shapes.known_dims(node.outputs[0])[axis]
        selection = Selection("slice", (start, end, step), count, size)
    return None if selection is None else Entry(node, Part(selection, Place(axis, (size,))), False)


def _most(start: int, end: int, step: int) -> int | None:
    """How many positions a Slice takes at most, whatever the size of the axis; None where that has no limit."""
    if (start < 0) == (end < 0) and abs(end) < _END:
        return max(0, (end - start) * (1 if step > 0 else -1))
    if step > 0:
        return -start if start < 0 and end >= _END else None
    return start + 1 if start >= 0 and end <= -_END else None


def _gather_nd(node: ir.Node, dims: Dims) -> Entry | None:
    """``x[b, index[b]]``: one axis by positions for each entry of the batch."""
    index = node.inputs[1]
    shape = None if index is None else shapes.dims_of(index)
    batch_dims = shapes.attribute(node, "batch_dims", 0)
    if index is None or shape is None or len(dims) < 2:
        return None
    if batch_dims == 0:
        found, squeezed = _after_numbers(index, dims), True
    elif batch_dims == 1 and len(shape) in (2, 3) and shape[-1] == 1 and shape[0] == dims[0]:
        found, squeezed = index, len(shape) == 2
    else:
        return None
    if found is None:
        return None
    count = 1 if squeezed else shape[1]
    selection = Selection("batched", (), count, dims[1], found)
    return Entry(node, Part(selection, Place(1, dims[1:2]), Place(0, dims[:1])), squeezed)


def _after_numbers(index: ir.Value, dims: Dims) -> ir.Value | None:
    """The second column (batch, 1) of index pairs whose first column numbers the batch: 0, 1, 2, …"""
    joined = index.producer()
    shape = shapes.known_dims(index)
    if joined is None or joined.op_type != "Concat" or len(joined.inputs) != 2 or len(shape) != 2:
        return None
    first, second = joined.inputs
    if shapes.attribute(joined, "axis") % 2 != 1 or first is None or second is None:
        return None
    if shapes.dims_of(second) != (dims[0], 1) or shapes.dims_of(first) != (dims[0], 1):
        return None
    column = first.producer()
    numbers = None if column is None or column.op_type not in ("Unsqueeze", "Reshape") else column.inputs[0]
    counted = None if numbers is None else numbers.producer()
    if numbers is not None and counted is not None and counted.op_type == "Range":
        start, step = (shapes.constant_of(counted.inputs[i]) for i in (0, 2))
        return second if start is not None and step is not None and (start == 0).all() and (step == 1).all() else None
    known = shapes.constant_of(first)
    return second if known is not None and np.array_equal(known.reshape(-1), np.arange(known.size)) else None
