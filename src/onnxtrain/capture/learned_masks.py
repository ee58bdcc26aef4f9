"""Masks of attention that depend on what is learned: which keys they hide all the same, and how not to hide any.

A mask is read as nodes that were just written: a sum of terms, under conditions where minus infinity is put in place.
What is learned is taken to be finite itself; what is not is looked at when the graph runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.capture.nodes import op
from onnxtrain.ir.functions import is_inner_gradient
from onnxtrain.ir.traits import Trait, traits_of

_PARAMETER, _INPUT = "p_", "tensors_"  # how names begin: torch.export's of parameters, ours of inputs
_PASSED = ("Identity", "Expand", "Cast", "CastLike")  # what shows the keys that its first input shows
_MOVED = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Concat", "Pad", "Tile", "Trilu")
_TO_INFINITY = ("Log", "Div", "Reciprocal", "Pow")  # which finite numbers may be


def is_learned(mask: Any, names: Sequence[str] = (_PARAMETER, _INPUT)) -> bool:
    """Whether a mask depends on a parameter or a floating input: fused kernels do not give it a gradient.

    Args:
        mask: None where there is none.
        names: how the names begin of what it is to depend on.
    """
    todo, seen = [mask], set()
    while todo:
        value = todo.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        node = value.producer()
        if value.dtype == ir.DataType.BOOL:
            continue
        if node is None and str(value.name).startswith(tuple(names)) and value.dtype.is_floating_point():
            return True
        if node is not None and not _stops(node) and not _gives_integers(value, node):
            todo.extend(node.inputs[:1] if node.op_type == "CastLike" else node.inputs)
    return False


def shown_keys(mask: Any) -> Any:
    """Which keys a mask shows to which queries, as truth values that broadcast to it; None where it hides none."""
    node = mask.producer()
    if _is_structure(mask, node):
        if node.op_type in _PASSED:
            return shown_keys(node.inputs[0])
        if node.op_type == "Add":
            return _both(*map(shown_keys, node.inputs))
        if (place := _hiding(node)) is not None:
            condition = _with_an_axis(node.inputs[0])
            return _both(op.Not(condition) if place == 1 else condition, shown_keys(node.inputs[3 - place]))
    if not _may_hide(mask):
        return None
    return _with_an_axis(op.Greater(mask, op.CastLike(op.Constant(value_float=float("-inf")), mask)), mask)


def opened(mask: Any, seen: Any) -> Any:
    """A mask in which queries that see no key see all.

    Args:
        mask: hides keys.
        seen: for each query, whether it sees one.
    """
    node = mask.producer()
    if _is_structure(mask, node):
        if node.op_type == "Add":
            return op.Add(*(opened(term, seen) for term in node.inputs))
        if node.op_type in _PASSED:
            inner = opened(node.inputs[0], seen)
            return op.CastLike(inner, mask) if node.op_type.startswith("Cast") else inner
        if (place := _hiding(node)) is not None:
            condition, one, other = node.inputs
            if place == 1:
                return op.Where(op.And(condition, seen), one, opened(other, seen))
            return op.Where(op.Or(condition, op.Not(seen)), opened(one, seen), other)
    if not _may_hide(mask):
        return mask
    return op.Where(seen, mask, op.CastLike(op.Constant(value_float=0.0), mask))


def _is_structure(mask: Any, node: ir.Node | None) -> bool:
    """Whether what a mask is made of is looked at, rather than the mask: it has parts that are learned."""
    return node is not None and not node.domain and is_learned(mask, (_PARAMETER,))


def _hiding(node: ir.Node) -> int | None:
    """Which input of a Where is minus infinity; None where neither is, or it is another node."""
    if node.op_type != "Where":
        return None
    return next((place for place in (1, 2) if _is_infinite(node.inputs[place])), None)


def _is_infinite(value: Any) -> bool:
    """Whether a value is minus infinity, as a constant."""
    node = value.producer()
    while node is not None and node.op_type in _PASSED:
        value = node.inputs[0]
        node = value.producer()
    content = ir.convenience.get_const_tensor(value)
    return content is not None and content.dtype.is_floating_point() and bool(np.all(_numbers(content) == -np.inf))


def _numbers(content: Any) -> np.ndarray:
    return content.numpy().astype(np.float64)


def _both(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return op.And(one, other)


def _with_an_axis(shown: Any, like: Any = None) -> Any:
    """Truth values of at least one axis, along which they can be reduced."""
    shape = (shown if like is None else like).shape
    return op.Reshape(shown, [1]) if shape is not None and len(shape) == 0 else shown


def _may_hide(mask: Any) -> bool:
    """Whether numbers that are not learned, and may be infinite, are part of a mask."""
    todo, seen = [mask], set()
    while todo:
        value = todo.pop()
        node = value.producer()
        if id(value) in seen or (value.dtype is not None and not value.dtype.is_floating_point()):
            continue
        seen.add(id(value))
        if node is None or node.op_type == "Constant":
            if not _is_finite(value):
                return True
        elif node.op_type in _MOVED or traits_of(node) & (Trait.ELEMENTWISE | Trait.VIEW):
            if node.op_type in _TO_INFINITY:
                return True
            todo.extend(_floating(node))
        elif node.op_type == "ATen" or not is_learned(value, (_PARAMETER,)):
            return True
    return False


def _is_finite(value: Any) -> bool:
    """Whether numbers that nothing computes are finite: parameters, and constants that are."""
    content = ir.convenience.get_const_tensor(value)
    if content is None:
        return str(value.name).startswith(_PARAMETER)
    return not content.dtype.is_floating_point() or bool(np.isfinite(_numbers(content)).all())


def _floating(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of a node whose numbers it passes on."""
    is_first = node.op_type == "CastLike" or Trait.VIEW in traits_of(node)
    inputs = node.inputs[:1] if is_first else node.inputs[1:] if node.op_type == "Where" else node.inputs
    yield from (x for x in inputs if x is not None)


def _stops(node: ir.Node) -> bool:
    """Whether no gradient flows through a node; through a backward pass one does, once that is written out."""
    return Trait.STOP in traits_of(node) and not is_inner_gradient(node)


def _gives_integers(value: Any, node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return not ir.DataType(node.attributes["to"].as_int()).is_floating_point()
    return value.dtype is not None and not value.dtype.is_floating_point()
