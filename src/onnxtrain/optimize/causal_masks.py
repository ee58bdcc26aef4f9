"""Masks that are causal: attention that is told so skips half of its scores, and reads no mask.

Models write the mask out where they cannot know that a kernel has one of its own: ``columns <= rows`` of two rows of
numbers, a triangle of ones, or one of minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN

_MOVES = ("Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity")
_ORDERS: dict[bool, dict[str, tuple[int, int]]] = {  # by whether it holds for what is hidden: columns and rows
    False: {"LessOrEqual": (0, 1), "GreaterOrEqual": (1, 0)},
    True: {"Greater": (0, 1), "Less": (1, 0)},
}


def causal_attention(node: ir.Node) -> tuple[ir.Node, Callable[[Builder], Any]] | None:
    """An attention with a mask, and what writes the causal one in its place; None where the mask is another one."""
    q, k, v, mask = node.inputs[:4]
    if node.domain != DOMAIN or q is None or k is None or mask is None or not _fits(mask, q, k, node.outputs[0]):
        return None
    if not _is_causal(mask):
        return None
    given = {"outputs": len(node.outputs)} | {name: attribute.value for name, attribute in node.attributes.items()}
    return node, lambda op: op.CausalScaledDotProductAttention(q, k, v, **given)


def _fits(mask: ir.Value, q: ir.Value, k: ir.Value, y: ir.Value) -> bool:
    """Whether a mask has all rows and columns of the scores, and adds no batch or head to what is attended."""
    dims = [shapes.dims_of(value) for value in (mask, q, k, y)]
    if any(d is None or len(d) < 2 for d in dims):
        return False
    of_mask, of_q, of_k, of_y = (d for d in dims if d is not None)
    return of_mask[-2:] == (of_q[-2], of_k[-2]) and of_y[:-2] == of_q[:-2]


def _is_causal(mask: ir.Value) -> bool:
    """Whether a mask is 0 where the column is not after the row, and elsewhere leaves nothing of a score."""
    node = _made_by(mask)
    if node is None:
        return False
    if node.op_type == "Trilu":
        return _is_triangle(node, hidden=True) and _is_everywhere(node.inputs[0], _is_least)
    if node.op_type != "Where":
        return False
    condition, chosen, other = node.inputs
    hidden = _is_everywhere(other, _is_zero)
    seen, unseen = (other, chosen) if hidden else (chosen, other)
    return _is_everywhere(seen, _is_zero) and _is_everywhere(unseen, _is_least) and _holds(condition, hidden)


def _holds(value: ir.Value | None, hidden: bool) -> bool:
    """Whether a condition holds for what is hidden, or for what is seen: it compares, or is a triangle of ones."""
    node = _made_by(value)
    if node is None:
        return False
    if node.op_type == "Not":
        return _holds(node.inputs[0], not hidden)
    places = _ORDERS[hidden].get(node.op_type)
    if places is None:
        return _is_triangle(node, hidden) and _is_everywhere(node.inputs[0], np.all)
    columns, rows = (node.inputs[place] for place in places)
    return _counts(columns, -1) and _counts(rows, -2)


def _is_triangle(node: ir.Node, hidden: bool) -> bool:
    """Whether a node keeps what is above the diagonal alone; where it is not of what is hidden, the rest."""
    first, diagonal = shapes.operand(node, 1), int(hidden)
    is_there = _is_number(first, diagonal) if first is not None else not diagonal
    return node.op_type == "Trilu" and is_there and bool(shapes.attribute(node, "upper", 1)) is hidden


def _is_everywhere(value: ir.Value | None, test: Callable[[np.ndarray], object]) -> bool:
    """Whether all elements of a value are those of a constant that passes a test."""
    while value is not None and (content := shapes.constant_of(value)) is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in _MOVES else None
    return value is not None and bool(test(content))


def _is_zero(content: np.ndarray) -> object:
    return np.all(content == 0)


def _is_least(content: np.ndarray) -> object:
    """Minus infinity, or the least number of the type: no score is left beside it."""
    return content.dtype.kind not in "biu" and np.all(content <= ml_dtypes.finfo(content.dtype).min)


def _made_by(value: ir.Value | None, moves: tuple[str, ...] = ("Expand",)) -> ir.Node | None:
    """The node that makes a value, past those of some kinds."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in moves and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def _counts(value: ir.Value | None, axis: int) -> bool:
    """Whether a value is 0, 1, 2… along an axis counted from the end, and has no other axis of more than one place."""
    dims = None if value is None else shapes.dims_of(value)
    if dims is None or any(dim != 1 for place, dim in enumerate(dims, -len(dims)) if place != axis):
        return False
    node = _made_by(value, ("Reshape", "Unsqueeze", "Squeeze"))
    if node is None or node.op_type != "Range":
        return False
    first, _, step = node.inputs
    return _is_number(first, 0) and _is_number(step, 1)


def _is_number(value: ir.Value | None, number: int) -> bool:
    content = shapes.constant_of(value)
    return content is not None and content.size == 1 and content.item() == number


__all__ = ["causal_attention"]
