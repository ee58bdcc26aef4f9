"""How rows pass through operators: which inputs have the rows of an output, and the same node over packed rows.

A *row* is one position of a pair of axes (batch, token), or of one axis that is both merged. The *layout* of a value
says where its rows are: ``(batch, token)`` or ``(flat,)``. A value is *packed* when some of its rows stand one after
the other on its first axis and its other axes follow in their order: (batch, heads, tokens, width) of layout (0, 2)
becomes (rows, heads, width). An operator that computes each row from the same row of its inputs has a *passage*,
by a rule of
``passage_rules``; any other needs its inputs whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.traits import Trait, traits_of

Layout: TypeAlias = tuple[int, ...]
Value = ir.Value


@dataclasses.dataclass(frozen=True)
class Operand:
    """What an input is to the rows of an output.

    Args:
        layout: for each row axis of the output, the input's axis; None where the input is the same for all of it.
            All None: the input has no rows. A merged axis of the output may be two of the input, and the reverse.
    """

    layout: tuple[int | None, ...]

    @property
    def has_rows(self) -> bool:
        """Whether the input has every row of the output."""
        return None not in self.layout

    @property
    def is_free(self) -> bool:
        """Whether the input is the same for all rows."""
        return set(self.layout) == {None}


FREE = Operand((None,))
Build: TypeAlias = Callable[[Builder, Sequence[Any]], Sequence[Value]]


@dataclasses.dataclass(frozen=True)
class Passage:
    """How rows pass through one node.

    Args:
        operands: what each input is; None for inputs that are left out.
        build: the node over packed inputs (free ones as they are): its packed outputs.
    """

    operands: tuple[Operand | None, ...]
    build: Build


Rule: TypeAlias = Callable[[ir.Node, Layout], "Passage | None"]
RULES: dict[str, Rule] = {}


def passage(*op_types: str) -> Callable[[Rule], Rule]:
    """Register the rule of one or more operators (ours by their plain names)."""

    def register(rule: Rule) -> Rule:
        for op_type in op_types:
            if op_type in RULES:
                raise ValueError(f"rows pass through {op_type} by two rules")
            RULES[op_type] = rule
        return rule

    return register


def passage_of(node: ir.Node, layout: Layout) -> Passage | None:
    """How the rows of a node's outputs, which all have the layout, pass through it; None where they do not."""
    if node.domain not in ("", DOMAIN) or any(shapes.dims_of(v) is None for v in (*node.inputs, *node.outputs) if v):
        return None
    rule = RULES.get(node.op_type)
    if rule is None and Trait.ELEMENTWISE in traits_of(node):
        rule = elementwise
    return None if rule is None else rule(node, layout)


def rest_of(value: Value, layout: Layout) -> list[int]:
    """The axes of a value that are not rows, in order."""
    return [a for a in range(shapes.rank(value)) if a not in layout]


def loses_rows(value: Value, node: ir.Node) -> bool:
    """Whether a node's outputs have no longer the first two axes of an input with three."""
    dims = shapes.dims_of(value)
    if dims is None or len(dims) < 3:
        return False
    return all((shapes.dims_of(y) or ())[:2] != dims[:2] for y in node.outputs)


def row_axes(value: Value) -> Layout | None:
    """The axes of a value that may be rows: two that come before others or are both sizes, or one that is merged."""
    dims = shapes.dims_of(value)
    if dims is None or not dims:
        return None
    if len(dims) > 2 or (len(dims) == 2 and not any(isinstance(d, int) for d in dims)):
        return (0, 1)
    return (0,) if len(dims) == 1 and is_merged(shapes.known_dims(value)[0]) else None


def is_merged(dim: shapes.Dim) -> bool:
    """Whether a dimension is a product: the tokens of all sequences."""
    return not isinstance(dim, int) and dim.value is not None and not dim.value.isidentifier()


def again(node: ir.Node, **changed: Any) -> Build:
    """The same operator with the same attributes but for those changed."""

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        attributes = {a.name: a.value for a in node.attributes.values()} | changed
        made = op.node(node.op_type, inputs, attributes, domain=node.domain, outputs=len(node.outputs))
        return made.outputs

    return build


def elementwise(node: ir.Node, layout: Layout) -> Passage | None:
    """Every input broadcasts to the output."""
    y = node.outputs[0]
    operands = [None if x is None else broadcast_operand(x, y, layout) for x in node.inputs]
    if any(o is None and x is not None for o, x in zip(operands, node.inputs, strict=True)):
        return None
    rest = len(rest_of(y, layout))

    def build(op: Builder, inputs: Sequence[Any]) -> Sequence[Value]:
        aligned = [
            _aligned(op, x, node.inputs[i], operands[i], rest, layout, shapes.rank(y)) for i, x in enumerate(inputs)
        ]
        return again(node)(op, aligned)

    return Passage(tuple(operands), build)


def broadcast_operand(x: Value, y: Value, layout: Layout) -> Operand | None:
    """What an input that broadcasts to an output is to its rows; None where that is not known."""
    dims, wide = shapes.known_dims(x), shapes.known_dims(y)
    shift, found = len(wide) - len(dims), []
    for axis in layout:
        dim = dims[axis - shift] if axis >= shift else 1
        if dim == 1 and wide[axis] != 1:
            found.append(None)
        elif dim == wide[axis] and axis >= shift:
            found.append(axis - shift)
        elif axis < shift:
            found.append(None)
        else:
            return None
    return Operand(tuple(found))


def _aligned(
    op: Builder, x: Value | None, original: Value | None, operand: Operand | None, rest: int, layout: Layout, rank: int
) -> Value | None:
    """A packed or free operand with its axes under those of the packed output."""
    if x is None or original is None or operand is None:
        return x
    if operand.is_free:
        shift = rank - shapes.rank(original)
        gone = [a - shift for a in layout if a >= shift]
        return op.Squeeze(x, op.ints(*gone)) if gone else x
    missing = rest + 1 - shapes.rank(x)
    return op.Unsqueeze(x, op.ints(*range(1, missing + 1))) if missing > 0 else x
