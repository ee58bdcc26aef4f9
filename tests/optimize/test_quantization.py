"""Quantization pairs in a graph and fake quantization in a module: straight through inside of the range."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.optimize import optimize
from onnxtrain.plan import make_plan


def _pair(scale: np.ndarray, zero_point: np.ndarray, other: np.ndarray | None = None) -> ForwardGraph:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="pair")
    value = ir.val("x", dtype=ir.DataType.FLOAT, shape=[3, 4])
    graph.inputs.append(value)
    op = Builder(graph)
    level = op.QuantizeLinear(value, scale, zero_point)
    y = op.Mul(op.DequantizeLinear(level, scale if other is None else other, zero_point), 2.0, name="y")
    graph.outputs.append(y)
    return ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), (), (), ("y",), {}, ("x",)))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("name", ["torch", "onnxruntime"])
def test_pair_passes_the_gradient_inside_of_the_range(name: str, channels: bool) -> None:
    scale = np.array([0.01, 0.02, 0.01, 0.005], np.float32) if channels else np.array(0.01, np.float32)
    zero_point = np.array([0, 5, -3, 0], np.int8) if channels else np.array(3, np.int8)
    graph = _pair(scale, zero_point)
    optimize(graph)
    executable = backend(name).compile(make_plan(build_gradient(graph)))
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    (y,), saved = executable.forward([x])
    (dx,) = executable.backward(saved, [torch.ones(3, 4)])
    level = (x / torch.tensor(scale)).round() + torch.tensor(zero_point)
    np.testing.assert_allclose(
        np.asarray(y), (level.clamp(-128, 127) - torch.tensor(zero_point)) * torch.tensor(scale) * 2, rtol=1e-6
    )
    inside = (level >= -128) & (level <= 127)
    assert inside.any() and not inside.all()
    np.testing.assert_array_equal(np.asarray(dx), 2.0 * inside)


def test_pair_of_two_scales_stays() -> None:
    graph = _pair(np.array(0.01, np.float32), np.array(3, np.int8), np.array(0.02, np.float32))
    optimize(graph)
    assert [n.op_type for n in graph.model.graph] == ["QuantizeLinear", "DequantizeLinear", "Mul"]
