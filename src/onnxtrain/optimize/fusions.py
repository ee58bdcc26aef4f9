"""Fusions: formulas that models write out become the operator that has a fused kernel in both directions.

A fused kernel rounds differently in the last digits; nothing else changes.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.graphs import SOURCE, source_of


class FusionsPass(ir.passes.InPlacePass):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` is Gelu's tanh approximation (``gelu_new`` of GPT-2).

    Products and sums may be in any order. What is fused keeps the source line of the formula's last node.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        found = [pair for node in model.graph if node.op_type == "Tanh" and (pair := _gelu(node)) is not None]
        for last, x in found:
            fused = ir.Node("", "Gelu", [x], [ir.Attr("approximate", ir.AttributeType.STRING, "tanh")])
            old, new = last.outputs[0], fused.outputs[0]
            new.type, new.shape = old.type, old.shape
            if line := source_of(last):
                fused.metadata_props[SOURCE] = line
            ir.convenience.replace_nodes_and_values(model.graph, last, [last], [fused], [old], [new])
        if found:
            remove_unread(model.graph)
        return ir.passes.PassResult(model, bool(found))


def _gelu(tanh: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The last node of the formula around a Tanh, and what it is computed of; None where it is another formula."""
    last = _reader(_reader(tanh, "Add"), "Mul")
    inner = _beside(tanh.inputs[0], "Mul", math.sqrt(2 / math.pi))
    for half, total in _orders(last):
        x = _beside(half, "Mul", 0.5)
        is_outer = x is not None and _beside(total, "Add", 1.0) is tanh.outputs[0]
        if last is not None and x is not None and is_outer and _is_inner(inner, x):
            return (last, x) if _rank(last.outputs[0]) == _rank(x) else None
    return None


def _is_inner(value: ir.Value | None, x: ir.Value) -> bool:
    """Whether a value is ``x + 0.044715 x^3``."""
    for operand, cubic in _orders(_made_by(value, "Add")):
        power = _made_by(_beside(cubic, "Mul", 0.044715), "Pow")
        if operand is x and power is not None and power.inputs[0] is x and _is(power.inputs[1], 3.0):
            return True
    return False


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
