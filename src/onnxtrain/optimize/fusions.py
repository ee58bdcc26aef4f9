"""Fusions: formulas that models write out become the operator that has a fused kernel in both directions.

A fused kernel rounds differently in the last digits; nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import origin_of
from onnxtrain.optimize.causal_masks import causal_attention

_Fused: TypeAlias = tuple[ir.Node, Callable[[Builder], Any]]  # the last node of a formula, and what writes its results


class FusionsPass(ir.passes.InPlacePass):
    """Formulas become one node: Gelu's tanh approximation, the root mean square normalization, causal attention.

    The first is ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` (``gelu_new`` of GPT-2), the second
    ``x / sqrt(mean(x^2) + epsilon) * scale`` over the last axis (Llama and its kin), the third attention with a mask
    that is causal. Products and sums may be in any order. What is fused keeps the source line of the formula's last
    node.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        found = [_fuse(model.graph, node) for node in list(model.graph) if node.op_type in _FORMULAS]
        if any(found):
            remove_unread(model.graph)
        return ir.passes.PassResult(model, any(found))


def _fuse(graph: ir.Graph, node: ir.Node) -> bool:
    """Write what is in the place of the formula around a node; says whether there is one."""
    found = _FORMULAS[node.op_type](node)
    if found is None:
        return False
    last, write = found
    op = Builder(graph, before=last)
    op.metadata = origin_of(last)
    made = write(op)
    results = made if isinstance(made, tuple) else (made,)
    for old, new in zip(last.outputs, results, strict=True):
        new.type, new.shape = old.type, old.shape
    ir.convenience.replace_nodes_and_values(graph, last, [last], [], last.outputs, results)
    return True


def _gelu(tanh: ir.Node) -> _Fused | None:
    """The last node of the formula around a Tanh, and what writes its result; None where it is another formula."""
    last = _reader(_reader(tanh, "Add"), "Mul")
    inner = _beside(tanh.inputs[0], "Mul", math.sqrt(2 / math.pi))
    for half, total in _orders(last):
        x = _beside(half, "Mul", 0.5)
        is_outer = x is not None and _beside(total, "Add", 1.0) is tanh.outputs[0]
        if last is not None and x is not None and is_outer and _is_inner(inner, x):
            is_whole = _rank(last.outputs[0]) == _rank(x)
            return (last, lambda op, x=x: op.Gelu(x, approximate="tanh")) if is_whole else None
    return None


def _is_inner(value: ir.Value | None, x: ir.Value) -> bool:
    """Whether a value is ``x + 0.044715 x^3``."""
    for operand, cubic in _orders(_made_by(value, "Add")):
        power = _made_by(_beside(cubic, "Mul", 0.044715), "Pow")
        if operand is x and power is not None and power.inputs[0] is x and _is(power.inputs[1], 3.0):
            return True
    return False


def _rms_norm(root: ir.Node) -> _Fused | None:
    """The last node of the formula around a Sqrt, and what writes its result; None where it is another formula."""
    mean, epsilon = _with_constant(_made_by(root.inputs[0], "Add"))
    x = _mean_squared(mean)
    by = _reader(root, "Reciprocal")
    normalized = _reader(root, "Div") if by is None else _reader(by, "Mul")
    if x is None or epsilon is None or normalized is None or not _is_divided(normalized, x, by or root):
        return None
    cast = _reader(normalized, "Cast")
    last = _reader(cast or normalized, "Mul")
    scale = None if last is None else next((v for v in last.inputs if v is not (cast or normalized).outputs[0]), None)
    if last is None or scale is None or scale.dtype != last.outputs[0].dtype or not _is_of_last_axis(scale, x):
        return None

    def write(op: Builder) -> ir.Value:  # in the type of x; the result in that of the scale, which may be narrower
        norm = op.RMSNorm(x, op.cast(scale, shapes.dtype_of(x)), axis=-1, epsilon=epsilon)
        return op.cast(norm, shapes.dtype_of(scale))

    return last, write


def _mean_squared(value: ir.Value | None) -> ir.Value | None:
    """Of what a value that one node reads is the mean of squares over the last axis, which it keeps."""
    mean = _made_by(value, "ReduceMean")
    if mean is None or value is None or len(value.uses()) > 1 or not shapes.attribute(mean, "keepdims", 1):
        return None
    squares, axes = mean.inputs[0], shapes.constant_of(shapes.operand(mean, 1))
    rank = None if squares is None else _rank(squares)
    if rank is None or axes is None or [a % rank for a in axes.tolist()] != [rank - 1]:
        return None
    power, product = _made_by(squares, "Pow"), _made_by(squares, "Mul")
    if power is not None:
        return power.inputs[0] if _is(power.inputs[1], 2.0) else None
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _is_divided(node: ir.Node, x: ir.Value, by: ir.Node) -> bool:
    """Whether a product or quotient is of a value and what a node makes, in that order or, a product, in either."""
    orders = _orders(node) if node.op_type == "Mul" else (tuple(node.inputs),)
    return (x, by.outputs[0]) in orders


def _is_of_last_axis(scale: ir.Value, x: ir.Value) -> bool:
    """Whether a value has a number for each place of another's last axis."""
    return _rank(scale) == 1 and bool(_rank(x)) and shapes.known_dims(scale)[0] == shapes.known_dims(x)[-1]


def _with_constant(node: ir.Node | None) -> tuple[ir.Value | None, float | None]:
    """Of a sum with a constant number, the other operand and the number."""
    for operand, other in _orders(node):
        content = shapes.constant_of(other)
        if content is not None and content.size == 1:
            return operand, float(content.item())
    return None, None


def _beside(value: ir.Value | None, op_type: str, number: float) -> ir.Value | None:
    """What a value is made of with that operator and a constant number."""
    return next((x for x, other in _orders(_made_by(value, op_type)) if _is(other, number)), None)


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def _reader(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """The node of that operator that reads a node's result, where it alone does."""
    readers = () if node is None or node.outputs[0].is_graph_output() else node.outputs[0].uses()
    return next((reader for reader, _ in readers if len(readers) == 1 and reader.op_type == op_type), None)


def _orders(node: ir.Node | None) -> tuple[tuple[ir.Value | None, ...], ...]:
    """The operands of a sum or a product in both orders."""
    return () if node is None else (tuple(node.inputs), tuple(node.inputs)[::-1])


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


_ROUNDING = {"float16": 1e-3, "bfloat16": 1e-2}  # of others less


def _is(value: ir.Value | None, number: float) -> bool:
    """Whether a value is a constant scalar, up to the rounding of its type."""
    content = shapes.constant_of(value)
    if content is None or content.size != 1:
        return False
    return bool(np.isclose(content.item(), number, rtol=_ROUNDING.get(content.dtype.name, 1e-6)))


_FORMULAS: dict[str, Callable[[ir.Node], _Fused | None]] = {  # around which operator a formula is looked for
    "MaskedScaledDotProductAttention": causal_attention,
    "Sqrt": _rms_norm,
    "Tanh": _gelu,
}
