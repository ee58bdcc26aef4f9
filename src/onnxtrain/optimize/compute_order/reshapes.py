"""Parts of values whose axes are merged, split, added, taken away or expanded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import sympy

from onnxtrain.ir import shapes
from onnxtrain.ir.shapes import Dim, Dims
from onnxtrain.optimize.compute_order.rules import MixedError, Move, dims_at, operand_part, rule_of, same
from onnxtrain.optimize.compute_order.selections import Part, Place
from onnxtrain.optimize.compute_order.taking import Taker


@rule_of("Flatten", "Unsqueeze", "Squeeze")
def _without_shape(node: ir.Node, part: Part) -> Move | None:
    if node.op_type == "Squeeze" and shapes.operand(node, 1) is None:  # it would take the selected axis away
        return None
    found = _before(part, shapes.known_dims(node.outputs[0]), dims_at(node))
    return None if found is None else Move({0: found})


@rule_of("Reshape")
def _reshape(node: ir.Node, part: Part) -> Move | None:
    """The shape is stated anew, with the number of selected positions in it."""
    result = shapes.known_dims(node.outputs[0])
    found = _before(part, result, dims_at(node))
    if found is None:
        return None
    wanted = part.of(result)
    unknown = [axis for axis, d in enumerate(wanted) if not isinstance(d, int)]
    stated = shapes.data_of(node.inputs[1])
    left = unknown[0] if len(unknown) == 1 else part.place.axis if part.place.axis in unknown else -1
    copied = [axis for axis in unknown if axis != left]
    if copied and (not isinstance(stated, tuple) or any(isinstance(stated[axis], int) for axis in copied)):
        return None  # sizes are copied from the shape: it has to state them

    def edit(op: Taker, node: ir.Node) -> None:
        shape = node.inputs[1]
        assert shape is not None
        pieces = [
            op.Slice(shape, op.ints(a), op.ints(a + 1)) if a in copied else op.ints(d if isinstance(d, int) else -1)
            for a, d in enumerate(wanted)
        ]
        plain = op.ints(*(d if isinstance(d, int) else -1 for d in wanted))
        node.replace_input_with(1, op.Concat(*pieces, axis=0) if copied else plain)

    return Move({0: found}, edit)


def _before(part: Part, result: Dims, dims: Dims) -> Part | None:
    """The part of the operand of a change of shape; None where no one axis of it holds the selected one.

    Of no elements all axes have as many, so none is known again.
    """
    if 0 in (*result, *dims):
        return None
    if part.batch is not None and part.batch.merged and part.batch.axis != part.place.axis:
        return None
    axis, parts = part.place.axis, part.place.parts
    fine = [*result[:axis], *parts, *result[axis + 1 :]]
    chosen = axis + part.place.part
    place = _place(chosen, fine, dims)
    if place is None or part.batch is None:
        return None if place is None else part.moved(place, None)
    behind = part.batch.axis + (len(parts) - 1 if part.batch.axis > axis else 0)
    batch = _place(axis + part.batch.part if part.batch.axis == axis else behind, fine, dims)
    if batch is None or (batch.merged and batch.axis != place.axis):
        return None
    return part.moved(place, batch)


def _place(chosen: int, fine: Sequence[Dim], dims: Dims) -> Place | None:
    for ours, theirs in _groups(fine, dims):
        if chosen in ours:
            many = [i for i in ours if i == chosen or fine[i] != 1]
            axes = [j for j in theirs if dims[j] != 1]
            if len(axes) != 1:
                return None
            return Place(axes[0], tuple(fine[i] for i in many), many.index(chosen))
    return None


def _groups(a: Sequence[Dim], b: Sequence[Dim]) -> Iterator[tuple[range, range]]:
    """Runs of axes of two shapes of the same elements that have the same number of elements, as short as can be."""
    i = j = 0
    while i < len(a) and j < len(b):
        to, upto = i + 1, j + 1
        while not same(shapes.product(a[i:to]), shapes.product(b[j:upto])):
            if to < len(a) and _divides(shapes.product(a[i:to]), shapes.product(b[j:upto])):
                to += 1
            elif upto < len(b):
                upto += 1
            else:
                raise MixedError
        yield range(i, to), range(j, upto)
        i, j = to, upto


def _divides(a: Dim, b: Dim) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    if any(not isinstance(d, int) and d.value is None for d in (a, b)):
        raise MixedError
    return sympy.fraction(sympy.cancel(shapes.as_expression(b) / shapes.as_expression(a)))[1] == 1


@rule_of("Expand")
def _expand(node: ir.Node, part: Part) -> Move | None:
    """An axis that the operand owns is expanded no further; another to the number of selected positions."""
    result, data = shapes.known_dims(node.outputs[0]), dims_at(node)
    length = shapes.dims_of(node.inputs[1])  # type: ignore[arg-type]
    if length is None or part.place.merged:
        return None
    count = length[0]
    if not isinstance(count, int):
        return None
    found = operand_part(part, data, result)
    place = part.place.axis - (len(result) - count)
    size = 1 if found is not None else part.selection.count
    if place < 0:
        return None if found is None else Move({0: found})
    if not isinstance(size, int):
        return None

    def edit(op: Taker, node: ir.Node) -> None:
        shape, known = node.inputs[1], shapes.constant_of(node.inputs[1])
        assert shape is not None
        if known is not None:
            node.replace_input_with(1, op.ints(*(size if i == place else int(d) for i, d in enumerate(known))))
            return
        pieces = [op.ints(size)]
        if place:
            pieces.insert(0, op.Slice(shape, op.ints(0), op.ints(place)))
        if place + 1 < count:
            pieces.append(op.Slice(shape, op.ints(place + 1), op.ints(count)))
        node.replace_input_with(1, op.Concat(*pieces, axis=0))

    return Move({} if found is None else {0: found}, edit)
