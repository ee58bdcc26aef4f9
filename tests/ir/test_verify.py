"""verify finds malformed graphs and names the node."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from onnxtrain.errors import GraphError
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import SOURCE
from onnxtrain.ir.verify import verify


def model() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="verify")
    graph.inputs.append(ir.val("x", dtype=ir.DataType.FLOAT, shape=[2, 3]))
    op = Builder(graph)
    op.metadata = {SOURCE: "net.py:3"}
    graph.outputs.append(op.Add(op.Exp(graph.inputs[0]), op.Silu(graph.inputs[0])))
    return ir.Model(graph, ir_version=10)


def _swap(graph: ir.Graph) -> None:
    graph.insert_after(graph[2], graph[0])


def _double_name(graph: ir.Graph) -> None:
    graph[1].outputs[0].name = graph[0].outputs[0].name


def _unknown(graph: ir.Graph) -> None:
    graph[0].op_type = "Explode"


def _unknown_of_ours(graph: ir.Graph) -> None:
    graph[1].op_type = "Explode"


def _arity(graph: ir.Graph) -> None:
    graph[0].resize_inputs(3)


def _attribute(graph: ir.Graph) -> None:
    graph[0].attributes["axis"] = ir.AttrInt64("axis", 1)


def _types(graph: ir.Graph) -> None:
    graph[0].outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


BREAKS: dict[str, Callable[[ir.Graph], None]] = {
    "not defined before": _swap,
    "two values": _double_name,
    "no operator Explode in opset": _unknown,
    "no operator Explode in the domain": _unknown_of_ours,
    "inputs": _arity,
    "no attribute axis": _attribute,
    "different types": _types,
}


def test_good_graph_passes() -> None:
    verify(model())


@pytest.mark.parametrize("message", list(BREAKS))
def test_bad_graph_is_named(message: str) -> None:
    broken = model()
    BREAKS[message](broken.graph)
    with pytest.raises(GraphError, match=message) as raised:
        verify(broken, after="Test")
    assert raised.value.source == "net.py:3" and "after Test" in str(raised.value)


def test_output_without_producer() -> None:
    broken = model()
    broken.graph.outputs[0] = ir.val("lost", dtype=ir.DataType.FLOAT, shape=[])
    with pytest.raises(GraphError, match="lost"):
        verify(broken)
