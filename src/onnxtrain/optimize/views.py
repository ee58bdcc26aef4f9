"""Views in a row become one, or none: what they do to the order of elements is followed back from the last of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import rewrite
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import is_backward, keep_size

_IN_ORDER = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten"))  # keep the order of elements, whatever the shape


class ViewsPass(ir.passes.InPlacePass):
    """Chains of Reshape, Squeeze, Unsqueeze, Flatten and Transpose become as few nodes as can be.

    A chain that gives back what it started from goes. One that keeps the order of all elements is a Reshape: so is a
    Transpose that moves axes of size 1 alone. Two Transposes are one. Nodes of the backward pass do not read around
    those of the forward pass: what is saved between the two stays.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified, op = False, Builder(model.graph)
        for node in list(model.graph):
            if _is_view(node):
                origins = _known_origins(node)
                modified |= _bypass(node, origins) or _straighten(op, node, origins) or _join_transposes(node)
        return ir.passes.PassResult(model, modified)


def _is_view(node: ir.Node | None) -> bool:
    return (
        node is not None
        and node.domain == ""
        and (node.op_type in _IN_ORDER or node.op_type == "Transpose")
        and node.inputs[0] is not None
    )


@dataclasses.dataclass(frozen=True)
class _Order:
    """How the elements of a view lie in a value that it was made of.

    Args:
        axes: for each axis of the view that is not 1, the axis of the value; None where only the order of elements is
            known to be the same.
        kept: whether the order of elements is the same.
    """

    axes: tuple[int, ...] | None
    kept: bool = True


def _wide(value: ir.Value) -> tuple[int, ...]:
    """The axes that are not known to be of size 1."""
    return tuple(i for i, d in enumerate(shapes.known_dims(value)) if d != 1)


def _origins(node: ir.Node) -> Iterator[tuple[ir.Value, _Order]]:
    """The values that a view was made of, nearest first, each with how the view's elements lie in it."""
    before: ir.Node | None = node
    order: _Order | None = _Order(_wide(node.outputs[0]))
    while before is not None and _is_view(before) and is_backward(before) == is_backward(node):
        x = before.inputs[0]
        if x is None or not shapes.are_known(shapes.dims_of(x)):
            return
        order = _before(before, order)
        if order is None:
            return
        yield x, order
        before = x.producer()
        source = None if before is None else shapes.operand(before, 0)
        if source is not None and shapes.names_a_size(source, x):  # later sizes are made of it: it must stay
            return


def _before(node: ir.Node, order: _Order) -> _Order | None:
    """The order in the input of a view, given the one in its output; None where it is lost."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    if node.op_type == "Transpose":
        perm = _permutation(node)
        if order.axes is not None:
            axes = tuple(perm[a] for a in order.axes)
            return _Order(axes, axes == tuple(sorted(axes)))
        moved = [perm[a] for a in _wide(y)]
        return order if moved == sorted(moved) else None
    if order.axes is None:
        return order
    inner, outer = _wide(x), _wide(y)
    if [shapes.known_dims(x)[i] for i in inner] == [shapes.known_dims(y)[i] for i in outer]:
        place = dict(zip(outer, inner, strict=True))
        return _Order(tuple(place[a] for a in order.axes), order.kept)
    return _Order(None) if order.kept else None


def _permutation(node: ir.Node) -> tuple[int, ...]:
    given = shapes.attribute(node, "perm")
    return tuple(given) if given is not None else tuple(range(shapes.rank(node.outputs[0])))[::-1]


def _known_origins(node: ir.Node) -> list[ir.Value]:
    """The values that have the view's elements in the same order, nearest first."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    alone = node.op_type != "Transpose" and not _is_view(x.producer()) and not shapes.same_dims(x, y)
    if alone or not shapes.are_known(shapes.dims_of(y)):
        return []
    return [value for value, order in _origins(node) if order.kept]


def _bypass(node: ir.Node, origins: list[ir.Value]) -> bool:
    """Let all that read a view read the value with the same shape and order of elements that it was made of."""
    y = node.outputs[0]
    if y.is_graph_output():
        return False
    for x in reversed(origins):
        if shapes.same_dims(x, y) and not shapes.names_a_size(x, y):
            keep_size(y, x)
            y.replace_all_uses_with(x)
            return True
    return False


def _straighten(op: Builder, node: ir.Node, origins: list[ir.Value]) -> bool:
    """Make a view whose elements are in the order of a value before it a Reshape of that value."""
    if not origins or (len(origins) == 1 and node.op_type != "Transpose"):
        return False
    x = origins[-1]
    if node.op_type == "Reshape" and _is_absolute(node):
        node.replace_input_with(0, x)
        return True
    op.before, op.backward, op.metadata = node, is_backward(node), dict(node.metadata_props)
    target = _target(op, x, shapes.known_dims(node.outputs[0]))
    if target is None:
        return False
    rewrite(node, "Reshape", [x, target], [ir.AttrInt64("allowzero", 1)])
    return True


def _is_absolute(node: ir.Node) -> bool:
    """Whether a Reshape does not copy sizes of its input."""
    if shapes.attribute(node, "allowzero", 0):
        return True
    wanted = shapes.data_of(node.inputs[1])
    return isinstance(wanted, tuple) and 0 not in wanted


def _target(op: Builder, x: ir.Value, wanted: shapes.Dims) -> ir.Value | None:
    """The shape to which x is brought: constants, once -1, else sizes of x; None where a size is not one of x's.

    Among sizes that are read there is no -1: it has no meaning where one of them is 0, as in an empty batch.
    """
    if 0 in wanted:
        return None
    if sum(not isinstance(d, int) for d in wanted) <= 1:
        return op.ints(*(d if isinstance(d, int) else -1 for d in wanted))
    source = shapes.known_dims(x)
    if any(not isinstance(d, int) and d not in source for d in wanted):
        return None
    return op.Concat(*(op.ints(d) if isinstance(d, int) else op.size(x, source.index(d)) for d in wanted), axis=0)


def _join_transposes(node: ir.Node) -> bool:
    """A Transpose of a Transpose is one."""
    x = node.inputs[0]
    before = None if x is None else x.producer()
    if node.op_type != "Transpose" or before is None or before.op_type != "Transpose" or not _is_view(before):
        return False
    if is_backward(node) != is_backward(before):
        return False
    first, second = shapes.attribute(before, "perm"), shapes.attribute(node, "perm")
    if first is None or second is None:
        return False
    node.attributes["perm"] = ir.AttrInt64s("perm", [first[i] for i in second])
    node.replace_input_with(0, before.inputs[0])
    return True
