"""Counts of elements are right however many there are, and in every precision."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.plan import make_plan

MANY = 70_000  # more than half precision's largest number


def _gradient(op_type: str, x: torch.Tensor, dtype: ir.DataType) -> torch.Tensor:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="count")
    value = ir.val("x", dtype=dtype, shape=[ir.SymbolicDim(f"n{i}") for i in range(x.dim())])
    graph.inputs.append(value)
    y = getattr(Builder(graph), op_type)(value, keepdims=0)
    y.name = "y"
    graph.outputs.append(y)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), (), (), ("y",), {}, ("x",)))
    executable = backend("torch").compile(make_plan(build_gradient(forward)))
    _, saved = executable.forward([x])
    return executable.backward(saved, [torch.ones((), dtype=x.dtype)])[0]


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
@pytest.mark.parametrize("op_type", ["ReduceMean", "ReduceMax", "ReduceMin"])
def test_half_precision_counts_beyond_its_range(op_type: str, dtype: ir.DataType) -> None:
    torch_dtype = torch.float16 if dtype == ir.DataType.FLOAT16 else torch.bfloat16
    found = _gradient(op_type, torch.ones(MANY, dtype=torch_dtype), dtype)
    torch.testing.assert_close(found, torch.full((MANY,), 1 / MANY, dtype=torch_dtype), rtol=0, atol=0)


def test_mean_of_more_elements_than_32_bits_count() -> None:
    x = torch.ones(()).expand(2**16, 2**15 + 1)
    found = _gradient("ReduceMean", x, ir.DataType.FLOAT)
    assert found.shape == x.shape
    assert found[0, 0].item() == pytest.approx(1 / x.numel(), rel=1e-6)
