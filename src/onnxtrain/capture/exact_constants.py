"""Numbers as exact as the tensors they meet: translations make each of Python's floats a float32 before they cast it.

So they do with the number that a tensor holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.capture.aten import ATEN
from onnxtrain.capture.nodes import EXACT
from onnxtrain.capture.onnx_graph import TRACED
from onnxtrain.ir.graphs import DOMAIN

_ARITHMETIC = frozenset(
    ("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Sqrt", "Cast", "Range", "Mod", "Abs", "Max", "Min", "Exp", "Log")
)
_ITEM = torch.ops.aten._local_scalar_dense.default


def restore(graph: ir.Graph) -> None:
    """Compute in float64 what becomes float64: Python's numbers, what is made of sizes, and ranges.

    So are the numbers that an ATen node is given, and the ratio of Dropout. The types of the graph's values are known,
    and its nodes know the call that they were made for.
    """
    for node in list(graph.all_nodes()):
        widens = node.op_type in ("Cast", "CastLike") and node.domain == ""
        if widens and node.outputs[0].dtype == ir.DataType.DOUBLE:
            _replace(node, 0, node.meta.get(TRACED))
        elif node.op_type == "Dropout" and node.domain == "" and node.outputs[0].dtype == ir.DataType.DOUBLE:
            _replace(node, 1, None)
        elif node.op_type == ATEN and node.domain == DOMAIN:
            for place in range(len(node.inputs)):
                _replace(node, place, None)


def _replace(node: ir.Node, place: int, call: Any) -> None:
    source = node.inputs[place]
    exact = None if source is None else _exact(source, node, call)
    if exact is not None:
        node.replace_input_with(place, exact)


def _exact(value: ir.Value, before: ir.Node, call: Any) -> ir.Value | None:
    """A float32 value in float64, made before a node; None where it was meant to be float32."""
    node = value.producer()
    if node is None or value.dtype != ir.DataType.FLOAT:
        return None
    number = value.meta.get(EXACT) if "value_float" not in node.attributes else node.attributes["value_float"].value
    if number is not None:
        tensor = ir.tensor(np.array(number, np.float64))
        return _made(ir.node("Constant", [], {"value": tensor}), node, before)
    own = node.meta.get(TRACED)
    of_sizes = own is not None and isinstance(own.meta.get("val"), torch.SymFloat)
    if own is not None and own.target is _ITEM:
        source = node.inputs[0] if node.op_type == "Cast" else value
        is_exact = source is not None and source.dtype == ir.DataType.DOUBLE
        return source if is_exact else _made(ir.node("Cast", [source], {"to": int(ir.DataType.DOUBLE)}), node, before)
    if node.op_type not in _ARITHMETIC or not (of_sizes or (own is call and call is not None)):
        return None
    if node.op_type == "Cast":
        source = node.inputs[0]
        assert source is not None
        if source.dtype is not None and source.dtype.is_integer():
            return _made(ir.node("Cast", [source], {"to": int(ir.DataType.DOUBLE)}), node, before)
        return _exact(source, before, call)
    operands = [None if v is None else _exact(v, before, call) for v in node.inputs]
    if None in operands:
        return None
    return _made(ir.node(node.op_type, operands, node.attributes), node, before)


def _made(node: ir.Node, like: ir.Node, before: ir.Node) -> ir.Value:
    """The output of a new node that does in float64 what another does in float32."""
    node.metadata_props.update(like.metadata_props)
    node.meta.update(like.meta)
    result, old = node.outputs[0], like.outputs[0]
    result.type, result.shape = ir.TensorType(ir.DataType.DOUBLE), old.shape
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return result
