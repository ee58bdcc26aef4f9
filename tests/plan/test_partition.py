"""Saved values are found, and nothing else is saved."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature
from onnxtrain.plan import make_plan


def plan(*, gradients: bool = True) -> Plan:
    """y = tanh(x @ w) * 2, z = shape-only use of a large value."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="plan")
    for name, dims in (("x", ["n", 3]), ("w", [3, 4])):
        shape = [ir.SymbolicDim(d) if isinstance(d, str) else d for d in dims]
        graph.inputs.append(ir.val(name, dtype=ir.DataType.FLOAT, shape=shape))
    op = Builder(graph)
    hidden = op.MatMul(*graph.inputs)
    y = op.Mul(op.Tanh(hidden), op.constant(np.float32(2)))
    total = op.ReduceSum(y, keepdims=0)
    total.name = "total"
    graph.outputs.append(total)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), ("w",), (), ("total",), {}, ("w",)))
    return make_plan(build_gradient(forward) if gradients else forward)


def test_saved_values_are_what_the_backward_reads() -> None:
    made = plan()
    tanh = next(n for n in made.forward.graph if n.op_type == "Tanh").outputs[0].name
    assert "x" in made.saved and tanh in made.saved
    hidden = next(n for n in made.forward.graph if n.op_type == "MatMul").outputs[0].name
    assert hidden not in made.saved, "Tanh's rule needs the output, not the input"


def test_a_value_is_not_saved_for_its_size() -> None:
    made = plan()
    assert made.backward is not None
    y = next(n for n in made.forward.graph if n.op_type == "Mul").outputs[0].name
    assert y not in made.saved, "ReduceSum's rule needs the shape of its input only"
    assert not [n for n in made.backward.graph if n.op_type == "Shape" and n.inputs[0].name != "x"]


def test_interfaces() -> None:
    made = plan()
    assert [v.name for v in made.forward.graph.inputs] == ["x", "w"]
    assert made.backward is not None
    names = [v.name for v in made.backward.graph.inputs]
    assert names == [*made.saved, "total_grad"]
    assert made.gradients == {"w": "w_grad"}
    assert [v.name for v in made.backward.graph.outputs] == ["w_grad"]


def test_forward_alone() -> None:
    made = plan(gradients=False)
    assert made.backward is None and made.saved == ()


def test_a_probe_stays_in_the_pass_it_observes() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="probe")
    graph.inputs.append(ir.val("x", dtype=ir.DataType.FLOAT, shape=[2]))
    op = Builder(graph)
    call = {"operator": "onnxtrain::probe", "overload": "default", "arguments": '[{"input": 0}, "a"]', "keywords": "{}"}
    seen = op.node("ATen", graph.inputs, call, domain="onnxtrain", outputs=2, like=graph.inputs).outputs[0]
    graph.outputs.append(op.Neg(graph.inputs[0]))
    y = str(graph.outputs[0].name)
    training = build_gradient(ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), (), (), (y,), {}, ("x",))))
    copied = next(v for n in training.model.graph for v in n.outputs if v.name == seen.name)
    Builder(training.model.graph, backward=True).Neg(copied)  # what a later pass may do: read it in the backward alone
    made = make_plan(training)
    assert [n.op_type for n in made.forward.graph] == ["ATen", "Neg"]
    assert made.backward is not None and "ATen" not in [n.op_type for n in made.backward.graph]
