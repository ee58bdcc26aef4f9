"""The difference that moving a selection makes to a small classifier, as text."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import SOURCE
from onnxtrain.ir.passes import Pipeline, Step
from onnxtrain.ir.printer import diff
from onnxtrain.optimize.compute_order import ComputeOrderPass

PATH = Path(__file__).parent / "selections.diff"


def _classifier() -> ir.Model:
    """A residual block, normalized, of which the head reads the first token."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="classifier")
    batch, tokens = ir.SymbolicDim("batch"), ir.SymbolicDim("tokens")
    dims = {"x": [batch, tokens, 8], "scale": [8], "weight": [8, 8], "bias": [8], "head": [2, 8]}
    x, scale, weight, bias, head = (ir.val(n, dtype=ir.DataType.FLOAT, shape=d) for n, d in dims.items())
    graph.inputs.extend([x, scale, weight, bias, head])
    op = Builder(graph)
    op.metadata = {SOURCE: "block.py:7"}
    normal = op.LayerNormalization(op.Add(x, op.Tanh(op.Linear(x, weight, bias))), scale)
    op.metadata = {SOURCE: "head.py:3"}
    graph.outputs.append(op.LinearWithoutBias(op.Gather(normal, op.constant(0), axis=1), head))
    return ir.Model(graph, ir_version=10)


def test_selections(request: pytest.FixtureRequest) -> None:
    before, after = _classifier(), _classifier()
    Pipeline([Step(ComputeOrderPass(), "test")]).run(after)
    text = diff(before, after)
    if request.config.getoption("--regenerate-golden"):
        PATH.write_text(text)
    assert PATH.read_text() == text, f"{PATH.name} changed; if that is meant: make golden"
