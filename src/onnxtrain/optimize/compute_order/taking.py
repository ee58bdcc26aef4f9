"""The nodes that take a part of a value."""

from __future__ import annotations

import dataclasses
import itertools

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Dims
from onnxtrain.optimize.compute_order.selections import Part, Place, Selection

_TO_THE_START = -(2**63) + 1


def can_take(value: ir.Value, part: Part) -> bool:
    """Whether ``Taker`` knows how; a merged axis has to be taken apart by a shape of which one size may be unknown."""
    if part.batch is not None and part.batch.axis != part.place.axis and part.batch.merged:
        return False
    whole = _apart(shapes.known_dims(value), part.place)
    return not part.place.merged or sum(not isinstance(d, int) for d in whole) <= 1


def _apart(dims: Dims, place: Place) -> Dims:
    return (*dims[: place.axis], *place.parts, *dims[place.axis + 1 :])


class Taker(Builder):
    """A builder that also takes parts of values; it writes an index in another form once."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__(graph)
        self._forms: dict[tuple[ir.Value, int], ir.Value] = {}

    def take(self, value: ir.Value, part: Part) -> ir.Value:
        """The part of a value, its axis kept."""
        if part.place.merged:
            return self._of_merged(value, part)
        if part.spread:
            return self._spread(value, part)
        selection, axis = part.selection, part.place.axis
        if selection.kind == "positions":
            return self._of_positions(value, selection, axis)
        if selection.kind == "slice":
            start, end, step = selection.content
            return self.Slice(value, self.ints(start), self.ints(end), self.ints(axis), self.ints(step))
        if selection.kind == "batched":
            return self._of_batch(value, part)
        index = self._index(selection, 1)
        if selection.kind == "rows" and axis == 0:
            return self.node("ShrunkenGather", [value, index], {"axis": 0}, domain=DOMAIN).outputs[0]
        return self.Gather(value, index, axis=axis)

    def _index(self, selection: Selection, rank: int) -> ir.Value:
        """The positions of a selection that are computed at run time, with axes of size 1 put behind or taken away."""
        index = selection.index
        assert index is not None
        given = shapes.rank(index)
        if given == rank:
            return index
        if (index, rank) not in self._forms:
            self._forms[index, rank] = (self.Unsqueeze if given < rank else self.Squeeze)(index, self.ints(-1))
        return self._forms[index, rank]

    def _of_positions(self, value: ir.Value, selection: Selection, axis: int) -> ir.Value:
        """A Slice where several positions have equal distances on an axis of known size, else a Gather."""
        found = selection.content
        steps = {b - a for a, b in itertools.pairwise(found)}
        if len(steps) != 1 or 0 in steps or not isinstance(selection.size, int):
            return self.Gather(value, self.ints(*found), axis=axis)
        (step,) = steps
        end = found[-1] + (1 if step > 0 else -1)
        bounds = (found[0], _TO_THE_START if end < 0 else end, axis, step)
        return self.Slice(value, *(self.ints(b) for b in bounds))

    def _of_merged(self, value: ir.Value, part: Part) -> ir.Value:
        dims, place, batch = shapes.known_dims(value), part.place, part.batch
        whole = self.Reshape(value, self._shape(_apart(dims, place)))
        if batch is not None:
            shift = len(place.parts) - 1 if batch.axis > place.axis else 0
            number = batch.axis + (batch.part if batch.axis == place.axis else shift)
            batch = Place(number, (shapes.known_dims(whole)[number],))
        own = Place(place.axis + place.part, (place.parts[place.part],))
        return self.Reshape(self.take(whole, part.moved(own, batch)), self._shape(part.of(dims)))

    def _shape(self, dims: Dims) -> ir.Value:
        return self.ints(*(d if isinstance(d, int) else -1 for d in dims))

    def _of_batch(self, value: ir.Value, part: Part) -> ir.Value:
        """GatherND within the batch, both axes brought to the front and back."""
        assert part.batch is not None
        first = (part.batch.axis, part.place.axis)
        order = [*first, *(a for a in range(shapes.rank(value)) if a not in first)]
        taken = self.GatherND(self._ordered(value, order), self._index(part.selection, 3), batch_dims=1)
        return self._ordered(taken, [order.index(a) for a in range(len(order))])

    def _ordered(self, value: ir.Value, order: list[int]) -> ir.Value:
        return value if order == sorted(order) else self.Transpose(value, perm=order)

    def _spread(self, value: ir.Value, part: Part) -> ir.Value:
        """A value without an axis for the batch, taken for each entry: the batch is the first of ``part.rank`` axes."""
        axis = part.place.axis
        if shapes.rank(value) == part.rank:
            value, axis = self.Squeeze(value, self.ints(0)), axis - 1
        missing = part.rank - 1 - shapes.rank(value)
        if missing:
            value, axis = self.Unsqueeze(value, self.ints(*range(missing))), axis + missing
        taken = self.Gather(value, self._index(part.selection, 2), axis=axis)
        return self._ordered(taken, [axis, *(a for a in range(part.rank) if a != axis)])


def part_of_union(part: Part, union: Part) -> Part:
    """Where the positions of a part lie among those of a larger one."""
    numbers = tuple(union.selection.content.index(p) for p in part.selection.content)
    size = len(union.selection.content)
    selection = Selection("positions", numbers, len(numbers), size)
    return dataclasses.replace(part, selection=selection, place=Place(part.place.axis, (size,)))
