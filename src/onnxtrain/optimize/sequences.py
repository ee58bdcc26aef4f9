"""Sequences and optionals whose elements are known become plain tensors, which have gradients."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import bodies_of, replace
from onnxtrain.ir.builder import Builder

Value = ir.Value
_READERS = frozenset(("SequenceAt", "SequenceLength", "ConcatFromSequence", "OptionalGetElement", "OptionalHasElement"))
_MAKERS = ("SequenceEmpty", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence", "Optional")
RESOLVED = _READERS.union(_MAKERS)  # operators that are gone where the content of a sequence is known


class SequencesPass(ir.passes.InPlacePass):
    """Operators that read a sequence or an optional read the tensors it was made of instead.

    A sequence is known where it is built of tensors one by one, or by splitting a tensor into a known number of parts.
    Of a split into an unknown number of equal parts a single one, given by its index, is a slice.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = _resolve_all(model.graph, {})
        if modified:
            shapes.infer_graph(model.graph)  # what is in a sequence may have sizes that only its parts tell
        return ir.passes.PassResult(model, modified)


def _resolve_all(graph: ir.Graph, known: dict[Value, list[Value]]) -> bool:
    """Resolve all readers in a graph and in the bodies of its nodes, in place; says whether there were any."""
    modified = False
    for node in list(graph):
        for body in bodies_of(node):
            modified |= _resolve_all(body, known)
        if node.domain == "" and node.op_type in _READERS:
            op = Builder(graph, before=node)
            op.metadata = dict(node.metadata_props)
            made = _resolved(op, node, known)
            if made is not None:
                replace(graph, node, [made])
                modified = True
    return modified


def _resolved(op: Builder, node: ir.Node, known: dict[Value, list[Value]]) -> Value | None:
    """What a reader gives, as a value of the graph; None where that is not known."""
    source = shapes.operand(node, 0)
    if node.op_type.startswith("Optional"):
        return _optional(op, node, source)
    if source is None:
        return None
    elements = _elements(op.graph, source, known)
    if node.op_type == "SequenceAt":
        index = _index(shapes.operand(node, 1))
        if index is None:
            return None
        if elements is None:
            return _part(op, source.producer(), index)
        return elements[index] if -len(elements) <= index < len(elements) else None
    if elements is None:
        return None
    if node.op_type == "SequenceLength":
        return op.constant(len(elements))
    axis = shapes.attribute(node, "axis")
    if shapes.attribute(node, "new_axis", 0):
        elements = [op.Unsqueeze(e, op.ints(axis)) for e in elements]
    return op.Concat(*elements, axis=axis) if elements else None


def _optional(op: Builder, node: ir.Node, source: Value | None) -> Value | None:
    maker = None if source is None else source.producer()
    inner = source
    if maker is not None and maker.op_type == "Optional":
        inner = shapes.operand(maker, 0)
    if node.op_type == "OptionalHasElement":
        certain = inner is None or isinstance(inner.type, ir.TensorType)
        return op.constant(inner is not None) if certain else None
    return inner if inner is not None and isinstance(inner.type, ir.TensorType) else None


def _index(value: Value | None) -> int | None:
    content = shapes.constant_of(value)
    return None if content is None else int(content.reshape(-1)[0])


def _elements(graph: ir.Graph, sequence: Value, known: dict[Value, list[Value]]) -> list[Value] | None:
    """The tensors in a sequence, in order."""
    node = sequence.producer()
    if sequence in known or node is None or node.domain:
        return known.get(sequence)
    made: list[Value] | None = None
    if node.op_type == "SequenceEmpty":
        made = []
    elif node.op_type == "SequenceConstruct":
        made = [v for v in node.inputs if v is not None]
    elif node.op_type in ("SequenceInsert", "SequenceErase", "Identity"):
        made = _changed(node, _elements(graph, node.inputs[0], known))  # type: ignore[arg-type]
    elif node.op_type == "SplitToSequence":
        made = _parts(Builder(graph, before=node), node)
    if made is not None:
        known[sequence] = made
    return made


def _changed(node: ir.Node, before: list[Value] | None) -> list[Value] | None:
    if before is None or node.op_type == "Identity":
        return before
    inserts = node.op_type == "SequenceInsert"
    place = shapes.operand(node, 2 if inserts else 1)
    index = (len(before) if inserts else len(before) - 1) if place is None else _index(place)
    if index is None:
        return None
    made = list(before)
    if inserts:
        made.insert(index, node.inputs[1])  # type: ignore[arg-type]
    else:
        made.pop(index)
    return made


def _parts(op: Builder, node: ir.Node) -> list[Value] | None:
    """All parts of a split by one Split node, where their number is known."""
    x, split = node.inputs[0], shapes.operand(node, 1)
    assert x is not None
    op.metadata = dict(node.metadata_props)
    axis = shapes.attribute(node, "axis", 0)
    total, size = shapes.known_dims(x)[axis], 1 if split is None else shapes.data_of(split)
    sizes: Value | None = None
    count: shapes.Dim | None = None
    if split is not None and shapes.rank(split) == 1:
        sizes, count = split, shapes.known_dims(split)[0]
    elif isinstance(total, int) and isinstance(size, int):
        whole, rest = divmod(total, size)
        given = [size] * whole + [rest] * (rest > 0)
        sizes, count = op.ints(*given), len(given)
    if sizes is None or not isinstance(count, int):
        return None
    made = op.Split(x, op.cast(sizes, ir.DataType.INT64), axis=axis, outputs=count)
    parts = [made] if count == 1 else list(made)
    if split is None and not shapes.attribute(node, "keepdims", 1):
        return [op.Squeeze(p, op.ints(axis)) for p in parts]
    return parts


def _part(op: Builder, node: ir.Node | None, index: int) -> Value | None:
    """One of an unknown number of equal parts, counted from the first."""
    if node is None or node.op_type != "SplitToSequence" or index < 0:
        return None
    x, split = node.inputs[0], shapes.operand(node, 1)
    assert x is not None
    axis = shapes.attribute(node, "axis", 0)
    if split is None:
        keep = shapes.attribute(node, "keepdims", 1)
        return op.Gather(x, op.ints(index) if keep else op.constant(index), axis=axis)
    if shapes.rank(split) != 0:
        return None
    size = op.Reshape(op.cast(split, ir.DataType.INT64), op.ints(1))
    return op.Slice(x, op.Mul(size, op.ints(index)), op.Mul(size, op.ints(index + 1)), op.ints(axis))
