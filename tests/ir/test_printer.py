"""Printed graphs and their differences."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import SOURCE
from onnxtrain.ir.printer import RULER, diff, to_text


def model(*, extra: bool = False) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="tiny")
    graph.inputs.append(ir.val("x", dtype=ir.DataType.FLOAT, shape=[ir.SymbolicDim("batch"), 64]))
    op = Builder(graph)
    op.metadata = {SOURCE: "net.py:7"}
    y = op.Softmax(graph.inputs[0], axis=-1)
    y.name = "y"
    if extra:
        y = op.Mul(y, op.constant(np.float32(2)))
        y.name = "z"
    backward = Builder(graph, backward=True)
    graph.outputs.append(backward.Neg(y))
    return ir.Model(graph, ir_version=10)


def test_one_line_per_node() -> None:
    lines = to_text(model(), saved=["y"]).splitlines()
    assert lines[0] == "tiny: 2 nodes"
    assert lines[1].startswith("  input x: f32[batch,64]") and lines[1].endswith("# 256*batchB")
    assert lines[2].startswith("  y: f32[batch,64] = Softmax(x, axis=-1)")
    assert lines[2].endswith("# saved  256*batchB  net.py:7")
    assert lines[3] == RULER
    assert lines[-1].startswith("  output")


def test_constants_are_written_out() -> None:
    assert "Mul(y, 2.)" in to_text(model(extra=True))


def test_diff_shows_what_changed() -> None:
    text = diff(model(), model(extra=True))
    assert "+  z: f32[batch,64] = Mul(y, 2.)" in text
    assert diff(model(), model()) == ""
