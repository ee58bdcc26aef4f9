"""ONNX's control flow, whose bodies read the graph around them: closed, differentiated, and opened for a runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from releases import needs_tensors_over_dlpack

from onnxtrain.errors import GradientError, GraphError
from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import close_bodies
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Signature
from onnxtrain.ir.standard_form import attach
from onnxtrain.ir.verify import verify
from onnxtrain.plan import make_plan

BACKENDS = ("torch", "onnxruntime")
BRANCH = """
<ir_version: 10, opset_import: ["" : 20]>
branch (float[N,4] x, float[4,4] w, bool c) => (float[N,4] y) {
    two = Constant <value = float {2.0}> ()
    h = MatMul(x, w)
    y = If (c) <
        then_branch = yes () => (float[N,4] a) { s = Sin(h) a = Mul(s, two) },
        else_branch = no () => (float[N,4] b) { b = Mul(h, x) }
    >
}
"""
LOOP = """
<ir_version: 10, opset_import: ["" : 20]>
repeat (float[N,4] x, float[4,4] w, int64 count) => (float[N,4] y, float[T,N,4] rows) {
    h = Sin(x)
    y, rows = Loop (count, , h) <
        body = step (int64 i, bool go, float[N,4] s) => (bool on, float[N,4] new, float[N,4] row) {
            p = MatMul(s, w)
            new = Tanh(p)
            row = Mul(new, x)
            on = Identity(go)
        }
    >
}
"""
GROWING = LOOP.replace("new = Tanh(p)", "new = Concat <axis = 0> (p, s)").replace("Mul(new, x)", "Transpose(x)")
GROWING = GROWING.replace("float[N,4] new, float[N,4] row", "float[M,4] new, float[4,N] row").replace("T,N,4", "T,4,N")
GROWING = GROWING.replace("=> (float[N,4] y", "=> (float[K,4] y")


def _graph(text: str, outputs: tuple[str, ...], differentiable: tuple[str, ...] = ("x", "w")) -> ForwardGraph:
    model = ir.from_proto(onnx.parser.parse_model(text))
    close_bodies(model.graph)
    shapes.infer_graph(model.graph)
    verify(model)
    inputs = tuple(str(v.name) for v in model.graph.inputs)
    return ForwardGraph(model, Signature(inputs, (), (), outputs, {}, differentiable))


def _check(graph: ForwardGraph, name: str, given: list[Any], expected: Any) -> None:
    """Outputs and gradients as torch has them."""
    leaves = [t.clone().requires_grad_() for t in given[:2]]
    right = expected(*leaves)
    dys = [torch.randn_like(y) for y in right]
    wanted = torch.autograd.grad(right, leaves, dys, allow_unused=True, materialize_grads=True)
    executable = backend(name).compile(make_plan(build_gradient(graph)))
    made, saved = executable.forward(given)
    for ours, theirs in zip(made, right, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(executable.backward(saved, dys), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-5)


def test_what_a_body_reads_is_an_operand() -> None:
    graph = _graph(BRANCH, ("y",)).model.graph
    node = next(n for n in graph if n.op_type == "If")
    assert node.domain == DOMAIN and [v.name for v in node.inputs] == ["c", "h", "x"]
    opened = attach(ir.Model(graph, ir_version=10)).graph
    found = next(n for n in opened if n.op_type == "If")
    assert found.domain == "" and [v.name for v in found.inputs] == ["c"]
    assert [v.name for v in node.inputs] == ["c", "h", "x"], "attach gives a copy"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("flag", [True, False])
def test_branch(name: str, flag: bool) -> None:
    def expected(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [(x @ w).sin() * 2 if flag else (x @ w) * x]

    given = [torch.randn(3, 4), torch.randn(4, 4), torch.tensor(flag)]
    needs_tensors_over_dlpack(name)
    _check(_graph(BRANCH, ("y",)), name, given, expected)


# onnxruntime (1.31) runs no Scan of no iterations, which the gradient of a loop of none would be
@pytest.mark.parametrize(("name", "count"), [("torch", 3), ("torch", 1), ("torch", 0), ("onnxruntime", 3)])
def test_loop(name: str, count: int) -> None:
    def expected(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        s, rows = x.sin(), []
        for _ in range(count):
            s = torch.tanh(s @ w)
            rows.append(s * x)
        return [s, torch.stack(rows) if rows else x.new_zeros(0, 3, 4) * x]

    given = [torch.randn(3, 4), torch.randn(4, 4), torch.tensor(count)]
    needs_tensors_over_dlpack(name)
    _check(_graph(LOOP, ("y", "rows")), name, given, expected)


def test_state_that_grows_is_refused() -> None:
    with pytest.raises(GradientError, match="Loop with a state whose size changes"):
        build_gradient(_graph(GROWING, ("y", "rows")))


def test_verify_looks_into_bodies() -> None:
    graph = _graph(BRANCH, ("y",))
    node = next(n for n in graph.model.graph if n.op_type == "If")
    node.attributes["then_branch"].as_graph()[0].op_type = "Sinus"
    with pytest.raises(GraphError, match="Sinus"):
        verify(graph.model)
