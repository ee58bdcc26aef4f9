"""One rule for each operator: which parts of its inputs give a part of its output.

A rule says nothing (None) where the operator mixes the axis, or where anything it needs to know is not known: then the
selection stays below the node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Dim, Dims
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.compute_order.selections import Part, Place, positions, slice_of
from onnxtrain.optimize.compute_order.taking import Taker

Edit: TypeAlias = Callable[[Taker, ir.Node], None]


@dataclasses.dataclass(frozen=True)
class Move:
    """What a node reads once a part of its output is wanted.

    Args:
        parts: the part of each input that is not read in full, by position.
        edit: changes of the node beside that, done after its inputs are replaced.
    """

    parts: dict[int, Part]
    edit: Edit | None = None


Rule: TypeAlias = Callable[[ir.Node, Part], Move | None]
RULES: dict[tuple[str, str], Rule] = {}
VIEWS = frozenset(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Split", "Slice", "Identity"))


class MixedError(Exception):
    """An operand cannot be read in part."""


def rule_of(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the rule of one or more operators."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys([(domain, op_type) for op_type in op_types], rule))
        return rule

    return register


def move(node: ir.Node, part: Part) -> Move | None:
    """How a node gives a part of its output, or None where it has to give all of it first."""
    rule = RULES.get((node.domain, node.op_type))
    if rule is None and Trait.ELEMENTWISE in traits_of(node):
        rule = _elementwise
    if rule is None or part.spread or any(v is not None and v.shape is None for v in node.inputs):
        return None
    try:
        return rule(node, part)
    except MixedError:
        return None


def dims_at(node: ir.Node, index: int = 0) -> Dims:
    """The dimensions of an input; none for one that is missing."""
    value = node.inputs[index]
    return () if value is None else shapes.known_dims(value)


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to be equal."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    if a.value is None or b.value is None:
        return False
    return a.value == b.value or shapes.as_expression(a) == shapes.as_expression(b)


def operand_part(part: Part, dims: Dims, result: Dims) -> Part | None:
    """The part of an operand that broadcasts to a result; None for an operand that is read in full."""
    shift = len(result) - len(dims)
    place = part.place.at(part.place.axis - shift)
    if place.axis < 0 or dims[place.axis] == 1:
        return None
    if not same(dims[place.axis], result[part.place.axis]):
        raise MixedError
    if part.batch is None:
        return part.moved(place, None)
    batch = part.batch.at(part.batch.axis - shift)
    if batch.axis >= 0 and same(dims[batch.axis], result[part.batch.axis]):
        return part.moved(place, batch)
    if part.batch.axis != 0 or part.place.merged or (batch.axis >= 0 and dims[batch.axis] != 1):
        raise MixedError
    return dataclasses.replace(part, place=place, batch=None, rank=len(result))


def _operands(node: ir.Node, part: Part, indices: range) -> Move:
    result, parts = shapes.known_dims(node.outputs[0]), {}
    for index in indices:
        if node.inputs[index] is not None:
            found = operand_part(part, dims_at(node, index), result)
            if found is not None:
                parts[index] = found
    return Move(parts)


def _elementwise(node: ir.Node, part: Part) -> Move | None:
    one = node.op_type in ("Dropout", "Cast", "CastLike")
    return _operands(node, part, range(1 if one else len(node.inputs)))


@rule_of("Softmax", "LogSoftmax")
def _softmax(node: ir.Node, part: Part) -> Move | None:
    axis = shapes.attribute(node, "axis", -1) % len(dims_at(node))
    return None if axis in part.axes else Move({0: part})


@rule_of("RMSNorm", domain=DOMAIN)
@rule_of("LayerNormalization", "RMSNormalization")
def _normalization(node: ir.Node, part: Part) -> Move | None:
    first = shapes.attribute(node, "axis", -1) % len(dims_at(node))
    return None if max(part.axes) >= first else Move({0: part})


@rule_of("MatMul")
def _matmul(node: ir.Node, part: Part) -> Move | None:
    """Rows are the left operand's, columns the right one's, and the batch both operands'."""
    result = shapes.known_dims(node.outputs[0])
    a, b = dims_at(node, 0), dims_at(node, 1)
    if len(a) < 2 or len(b) < 2:
        return None
    rows, columns = len(result) - 2, len(result) - 1
    if part.batch is not None and part.batch.axis in (rows, columns) and part.batch.axis != part.place.axis:
        return None
    found = operand_part(part, (*a[:-1], 1), result), operand_part(part, (*b[:-2], 1, b[-1]), result)
    return Move({i: p for i, p in enumerate(found) if p is not None})


@rule_of("Gemm")
def _gemm(node: ir.Node, part: Part) -> Move | None:
    index = part.place.axis
    if part.axes != {index}:
        return None
    transposed = bool(shapes.attribute(node, "transB" if index else "transA", 0))
    axis = 1 - index if transposed else index
    batch = None if part.batch is None else part.batch.at(axis)
    parts = {index: part.moved(part.place.at(axis), batch)}
    if shapes.operand(node, 2) is not None:
        bias = operand_part(part, dims_at(node, 2), shapes.known_dims(node.outputs[0]))
        if bias is not None:
            parts[2] = bias
    return Move(parts)


@rule_of("Linear", "LinearWithoutBias", domain=DOMAIN)
def _linear(node: ir.Node, part: Part) -> Move | None:
    """The last axis is the rows of weight and bias."""
    last = len(dims_at(node)) - 1
    if last not in part.axes:
        return Move({0: part})
    if part.batch is not None or last == 0:
        return None
    return Move({i: part.moved(part.place.at(0), None) for i in range(1, len(node.inputs))})


@rule_of("MatMulBnb4", "MatMulInt8Weight", domain=DOMAIN)
def _matmul_of_codes(node: ir.Node, part: Part) -> Move | None:
    """Of its rows alone: those of the weight are packed."""
    return None if len(dims_at(node)) - 1 in part.axes else Move({0: part})


@rule_of("Embedding", domain=DOMAIN)
def _embedding(node: ir.Node, part: Part) -> Move | None:
    return Move({1: part}) if max(part.axes) < len(dims_at(node, 1)) else None


@rule_of("Gather")
def _gather(node: ir.Node, part: Part) -> Move | None:
    """The axes of the index lie where the axis of the data was."""
    data, index = dims_at(node, 0), dims_at(node, 1)
    axis = shapes.attribute(node, "axis", 0) % len(data)
    if all(axis <= a < axis + len(index) for a in part.axes):
        return Move({1: _renumbered(part, lambda a: a - axis)})
    if any(axis <= a < axis + len(index) for a in part.axes):
        return None
    return Move({0: _renumbered(part, lambda a: a if a < axis else a - len(index) + 1)})


def _renumbered(part: Part, number: Callable[[int], int]) -> Part:
    batch = None if part.batch is None else part.batch.at(number(part.batch.axis))
    return part.moved(part.place.at(number(part.place.axis)), batch)


@rule_of("GatherElements")
def _gather_elements(node: ir.Node, part: Part) -> Move | None:
    axis = shapes.attribute(node, "axis", 0) % len(dims_at(node))
    if part.place.axis == axis:
        return Move({1: part})
    data, result = dims_at(node), shapes.known_dims(node.outputs[0])
    return Move({0: part, 1: part}) if all(same(data[a], result[a]) for a in part.axes) else None


@rule_of("Transpose")
def _transpose(node: ir.Node, part: Part) -> Move | None:
    order = shapes.attribute(node, "perm") or range(len(dims_at(node)) - 1, -1, -1)
    return Move({0: _renumbered(part, lambda a: order[a])})


@rule_of("Concat")
def _concat(node: ir.Node, part: Part) -> Move | None:
    axis = shapes.attribute(node, "axis") % len(dims_at(node))
    if axis not in part.axes:
        return Move(dict.fromkeys(range(len(node.inputs)), part))
    return _within_one(node, part, axis)


def _within_one(node: ir.Node, part: Part, axis: int) -> Move | None:
    """Positions of the joined axis that all lie in one input."""
    if part.selection.kind != "positions" or part.place.merged or part.batch is not None:
        return None
    sizes = [dims_at(node, i)[axis] for i in range(len(node.inputs))]
    for index, size in enumerate(sizes):
        before = _first(part.selection.content, sizes, index)
        if before is None:
            continue
        content = part.selection.content
        found = positions([p - before for p in content], size)
        if found is None or any((p - before < 0) != (p < 0) for p in content):  # one of them lies in another input
            continue
        if not isinstance(size, int) and (not _is_given(node, size) or any(p - before >= 0 for p in content)):
            continue
        if found.content == tuple(range(size if isinstance(size, int) else -1)):
            return Move({}, lambda op, n, i=index: _keep(n, i))
        return Move({index: Part(found, Place(axis, (size,)))}, lambda op, n, i=index: _keep(n, i))
    return None


def _is_given(node: ir.Node, size: Dim) -> bool:
    """Whether a size is an input's; of what is cut out of one nothing may be left, and a position lies beside it."""
    return node.graph is not None and size in shapes.sizes_of_inputs(node.graph)


def _first(content: tuple[int, ...], sizes: list[Dim], index: int) -> int | None:
    """The position, counted as the content is, at which an input of a Concat begins; None where it is not known."""
    if all(p >= 0 for p in content):
        before = sizes[:index]
        return sum(before) if all(isinstance(d, int) for d in before) else None  # type: ignore[arg-type]
    after = sizes[index + 1 :]
    return -sum(after) if all(isinstance(d, int) for d in after) and all(p < 0 for p in content) else None  # type: ignore[arg-type]


def _keep(node: ir.Node, index: int) -> None:
    """Make a Concat the Identity of one of its inputs."""
    kept = node.inputs[index]
    node.resize_inputs(1)
    node.replace_input_with(0, kept)
    node.op_type = "Identity"
    node.attributes.pop("axis")


@rule_of("Split")
def _split(node: ir.Node, part: Part) -> Move | None:
    axis = shapes.attribute(node, "axis", 0) % len(dims_at(node))
    return None if axis in part.axes else Move({0: part})


@rule_of("Slice")
def _slice(node: ir.Node, part: Part) -> Move | None:
    found = slice_of(node)
    return None if found is None or part.axes & set(found[2]) else Move({0: part})


@rule_of(
    *(f"Reduce{k}" for k in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")),
    "ArgMax",
    "ArgMin",
)
def _reduce(node: ir.Node, part: Part) -> Move | None:
    rank, keep = len(dims_at(node)), shapes.attribute(node, "keepdims", 1)
    gone = _reduced_axes(node, rank)
    if not gone:
        return None
    left = list(range(rank)) if keep else [a for a in range(rank) if a not in gone]
    found = _renumbered(part, lambda a: left[a])
    return None if gone & found.axes else Move({0: found})


def _reduced_axes(node: ir.Node, rank: int) -> set[int]:
    if node.op_type.startswith("Arg"):
        return {shapes.attribute(node, "axis", 0) % rank}
    axes = shapes.constant_of(shapes.operand(node, 1))
    stated = shapes.attribute(node, "axes") or () if axes is None else axes.reshape(-1).tolist()
    return {a % rank for a in stated}
