"""Which operators compute each row from the same row of their inputs, and how they do over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.optimize.rows.passages import (
    FREE,
    Layout,
    Operand,
    Passage,
    again,
    broadcast_operand,
    passage,
    rest_of,
)

Value = ir.Value


@passage("Dropout")
def _dropout(node: ir.Node, layout: Layout) -> Passage | None:
    """Each kept row draws numbers of its own; the dropped ones draw none, so eager's numbers are gone anyway."""
    operands = (Operand(layout), *(FREE for _ in node.inputs[1:]))
    training, ratio = (shapes.constant_of(shapes.operand(node, i)) for i in (2, 1))
    if training is None or not bool(training) or ratio is None or not 0.0 < float(ratio) < 1.0:
        return Passage(operands, again(node))

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        made = op.PackedDropout(*inputs[:2], outputs=2)
        return made[: len(node.outputs)]

    return Passage(operands, build)


@passage("Linear", "LinearWithoutBias", "MatMulBnb4", "MatMulInt8Weight")
def _linear(node: ir.Node, layout: Layout) -> Passage | None:
    if shapes.rank(node.outputs[0]) - 1 in layout:
        return None
    return Passage((Operand(layout), *(FREE for _ in node.inputs[1:])), again(node))


@passage("MatMul")
def _matmul(node: ir.Node, layout: Layout) -> Passage | None:
    """Rows of the left operand times a matrix."""
    a, b = node.inputs
    assert a is not None and b is not None
    if shapes.rank(b) != 2 or shapes.rank(node.outputs[0]) - 1 in layout:
        return None
    return Passage((Operand(layout), FREE), again(node))


@passage("Gemm")
def _gemm(node: ir.Node, layout: Layout) -> Passage | None:
    c = shapes.operand(node, 2)
    if layout != (0,) or shapes.attribute(node, "transA", 0):
        return None
    if c is not None and shapes.rank(c) == 2 and shapes.known_dims(c)[0] != 1:
        return None
    return Passage((Operand((0,)), FREE, *(FREE for _ in node.inputs[2:])), again(node))


@passage("LayerNormalization", "RMSNormalization", "RMSNorm")
def _normalization(node: ir.Node, layout: Layout) -> Passage | None:
    """The normalized axes come after the rows, so scale and bias have no rows."""
    x = node.inputs[0]
    assert x is not None
    rank = shapes.rank(x)
    axis = shapes.attribute(node, "axis", -1) % rank
    if any(a >= axis for a in layout) or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        return None
    return Passage((Operand(layout), *(FREE for _ in node.inputs[1:])), again(node, axis=axis - rank))


@passage("Softmax", "LogSoftmax")
def _softmax(node: ir.Node, layout: Layout) -> Passage | None:
    rank = shapes.rank(node.outputs[0])
    return _along(node, layout, shapes.attribute(node, "axis", -1) % rank, rank)


def _along(node: ir.Node, layout: Layout, axis: int, rank: int, free: int | None = None) -> Passage | None:
    """An operator along one axis that is not a row axis; further inputs are free."""
    if axis in layout:
        return None
    place = [a for a in range(rank) if a not in layout].index(axis) + 1
    count = len(node.inputs) - 1 if free is None else free
    return Passage((Operand(layout), *(FREE for _ in range(count))), again(node, axis=place))


@passage("Split")
def _split(node: ir.Node, layout: Layout) -> Passage | None:
    rank = shapes.rank(node.outputs[0])
    return _along(node, layout, shapes.attribute(node, "axis", 0) % rank, rank)


@passage("Gather")
def _gather(node: ir.Node, layout: Layout) -> Passage | None:
    """An axis of the data that is not a row axis, read at indices without rows."""
    data, indices = node.inputs
    assert data is not None and indices is not None
    rank, count = shapes.rank(data), shapes.rank(indices)
    axis = shapes.attribute(node, "axis", 0) % rank
    if any(axis <= a < axis + count for a in layout):
        return None
    inner = tuple(a if a < axis else a - count + 1 for a in layout)
    place = [a for a in range(rank) if a not in inner].index(axis) + 1
    return Passage((Operand(inner), FREE), again(node, axis=place))


@passage("GatherElements")
def _gather_elements(node: ir.Node, layout: Layout) -> Passage | None:
    """Chosen elements of each row: the log probability of a token's label."""
    data, indices = node.inputs
    assert data is not None and indices is not None
    rank = shapes.rank(data)
    made = _along(node, layout, shapes.attribute(node, "axis", 0) % rank, rank)
    if made is None or any(shapes.known_dims(data)[a] != shapes.known_dims(indices)[a] for a in layout):
        return None
    return Passage((Operand(layout), Operand(layout)), made.build)


@passage("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss(node: ir.Node, layout: Layout) -> Passage | None:
    """A loss for each label; classes are the second axis of the scores."""
    scores = node.inputs[0]
    assert scores is not None
    is_each = shapes.attribute(node, "reduction", "mean") == "none" and shapes.rank(scores) == len(layout) + 1
    if not is_each or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        return None
    inner = tuple(a + 1 if a else 0 for a in layout)
    return Passage((Operand(inner), Operand(layout), *(FREE for _ in node.inputs[2:])), again(node))


@passage("GatherND")
def _gather_nd(node: ir.Node, layout: Layout) -> Passage | None:
    """Places of the first axis, as a Gather, where that is not a row axis: ``x[:, :, 0]`` is one of a transposed x."""
    data, indices = node.inputs
    assert data is not None and indices is not None
    before = shapes.rank(indices) - 1
    if shapes.attribute(node, "batch_dims", 0) or shapes.known_dims(indices)[-1] != 1 or min(layout) < before:
        return None

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        return [op.Gather(inputs[0], op.Squeeze(inputs[1], op.ints(-1)), axis=1)]

    return Passage((Operand(tuple(a - before + 1 for a in layout)), FREE), build)


@passage("Embedding")
def _embedding(node: ir.Node, layout: Layout) -> Passage | None:
    """Rows of a table, one for each row of the indices."""
    indices = node.inputs[1]
    assert indices is not None
    if shapes.rank(node.outputs[0]) - 1 in layout:
        return None
    return Passage((FREE, Operand(layout)), again(node))


@passage("Concat")
def _concat(node: ir.Node, layout: Layout) -> Passage | None:
    rank = shapes.rank(node.outputs[0])
    made = _along(node, layout, shapes.attribute(node, "axis", 0) % rank, rank)
    return None if made is None else Passage(tuple(Operand(layout) for _ in node.inputs), made.build)


@passage("Slice")
def _slice(node: ir.Node, layout: Layout) -> Passage | None:
    axes, rank = shapes.constant_of(shapes.operand(node, 3)), shapes.rank(node.outputs[0])
    if axes is None:
        return None
    chosen = [int(a) % rank for a in axes.reshape(-1)]
    if set(chosen) & set(layout):
        return None
    rest = [a for a in range(rank) if a not in layout]

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        inputs = list(inputs)
        inputs[3] = op.ints(*(rest.index(a) + 1 for a in chosen))
        return again(node)(op, inputs)

    return Passage((Operand(layout), *(FREE for _ in node.inputs[1:])), build)


@passage("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")
def _reduce(node: ir.Node, layout: Layout) -> Passage | None:
    """Axes that are not rows."""
    x, axes = node.inputs[0], shapes.constant_of(shapes.operand(node, 1))
    assert x is not None
    if axes is None or not axes.size:
        return None
    rank, keep = shapes.rank(x), shapes.attribute(node, "keepdims", 1)
    gone = sorted(int(a) % rank for a in axes.reshape(-1))
    left = [a for a in range(rank) if keep or a not in gone]
    inner = tuple(left[a] for a in layout)
    if set(inner) & set(gone):
        return None
    rest = rest_of(x, inner)

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        return again(node)(op, [inputs[0], op.ints(*(rest.index(a) + 1 for a in gone))])

    return Passage((Operand(inner), FREE), build)


@passage("Transpose")
def _transpose(node: ir.Node, layout: Layout) -> Passage | None:
    x = node.inputs[0]
    assert x is not None
    order = shapes.attribute(node, "perm") or list(range(shapes.rank(x)))[::-1]
    inner = tuple(order[a] for a in layout)
    rest = rest_of(x, inner)
    moved = [rest.index(order[a]) for a in range(len(order)) if a not in layout]

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        if moved == sorted(moved):
            return [inputs[0]]
        return [op.Transpose(inputs[0], perm=[0, *(m + 1 for m in moved)])]

    return Passage((Operand(inner),), build)


@passage("Reshape", "Flatten", "Unsqueeze", "Squeeze")
def _reshape(node: ir.Node, layout: Layout) -> Passage | None:
    """Axes keep their place in the order of elements; rows may be merged or taken apart."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    inner = _source_axes(shapes.known_dims(x), shapes.known_dims(y), layout)
    if inner is None:
        return None
    rest = _packed_dims(y, layout)
    if rest is None:
        return None

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        before = [shapes.known_dims(x)[a] for a in rest_of(x, inner)]
        if before == [shapes.known_dims(y)[a] for a in rest_of(y, layout)]:
            return [inputs[0]]
        return [op.Reshape(inputs[0], op.ints(0, *rest))]

    return Passage((Operand(inner), *(FREE for _ in node.inputs[1:])), build)


@passage("Expand")
def _expand(node: ir.Node, layout: Layout) -> Passage | None:
    """Axes that are not rows grow."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    operand = broadcast_operand(x, y, layout)
    dims = _packed_dims(y, layout)
    if operand is None or not operand.has_rows or dims is None or -1 in dims:
        return None
    inner = tuple(a for a in operand.layout if a is not None)
    missing = len(dims) - len(rest_of(x, inner))

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        given = op.Unsqueeze(inputs[0], op.ints(*range(1, missing + 1))) if missing else inputs[0]
        return [op.Expand(given, op.ints(1, *dims))]

    return Passage((operand, FREE), build)


def _packed_dims(value: Value, layout: Layout) -> list[int] | None:
    """The dimensions of a packed value after the first, at most one of them -1; None where more are not known."""
    dims = shapes.known_dims(value)
    rest = [d if isinstance(d, int) else -1 for d in (dims[a] for a in rest_of(value, layout))]
    return rest if rest.count(-1) <= 1 and 0 not in rest else None


def _source_axes(before: shapes.Dims, after: shapes.Dims, layout: Layout) -> Layout | None:
    """The axes of a reshaped tensor's source that are its row axes: those with as many elements before them."""
    if 0 in (*before, *after):
        return None
    starts = {axis: shapes.product(before[:axis]) for axis in range(len(before))}
    found: list[int] = []
    for axis in layout:
        ahead = shapes.product(after[:axis])
        same = [a for a, start in starts.items() if start == ahead and before[a] == after[axis]]
        if same:
            found.append(same[-1])
            continue
        if len(layout) == 1:
            pairs = [a for a, s in starts.items() if s == ahead and shapes.product(before[a : a + 2]) == after[axis]]
            return (pairs[-1], pairs[-1] + 1) if pairs and pairs[-1] + 1 < len(before) else None
        break
    if len(found) == len(layout):
        return tuple(found) if len(set(found)) == len(found) else None
    if layout[1] == layout[0] + 1:
        total, ahead = shapes.product([after[a] for a in layout]), shapes.product(after[: layout[0]])
        same = [a for a, start in starts.items() if start == ahead and before[a] == total]
        return (same[-1],) if same else None
    return None
