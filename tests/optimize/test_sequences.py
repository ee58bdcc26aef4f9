"""Sequences and optionals of known content become plain tensors, and then have gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import pair, same_step

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.optimize import optimize
from onnxtrain.plan import make_plan

Tensor = torch.Tensor


def _graph(write: Callable[[Builder, ir.Value, ir.Value], ir.Value], symbolic: bool = False) -> ForwardGraph:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="sequence")
    rows = ir.SymbolicDim("rows") if symbolic else 6
    a, b = (ir.val(n, dtype=ir.DataType.FLOAT, shape=[rows, 4]) for n in "ab")
    graph.inputs.extend([a, b])
    y = write(Builder(graph), a, b)
    y.name = "y"
    graph.outputs.append(y)
    return ForwardGraph(ir.Model(graph, ir_version=10), Signature(("a", "b"), (), (), ("y",), {}, ("a", "b")))


def _constructed(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    return op.Mul(op.SequenceAt(op.SequenceConstruct(a, b), op.constant(-1)), a)


def _inserted(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    sequence = op.SequenceInsert(op.SequenceConstruct(a, b), op.Sin(a), op.constant(0))
    return op.ConcatFromSequence(op.SequenceErase(sequence, op.constant(1)), axis=1)


def _stacked(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    return op.ConcatFromSequence(op.SequenceConstruct(a, op.Mul(b, b)), axis=0, new_axis=1)


def _split(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    parts = op.SplitToSequence(op.Mul(a, b), op.constant(4), axis=0)
    return op.MatMul(op.SequenceAt(parts, op.constant(0)), op.Transpose(op.SequenceAt(parts, op.constant(1))))


def _unbound(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    parts = op.SplitToSequence(op.Mul(a, b), axis=0, keepdims=0)
    return op.Add(op.SequenceAt(parts, op.constant(2)), op.Sin(op.SequenceAt(parts, op.constant(0))))


def _sized(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    parts = op.SplitToSequence(op.Mul(a, b), op.ints(2, 1, 3), axis=0)
    return op.Mul(op.SequenceAt(parts, op.constant(2)), 3.0)


def _optional(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    a = op.Mul(a, b)
    return op.Sin(op.OptionalGetElement(op.Optional(a)))


CASES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "construct": (_constructed, lambda a, b: a * b),
    "insert": (_inserted, lambda a, b: torch.cat((a.sin(), b), 1)),
    "stack": (_stacked, lambda a, b: torch.stack((a, b * b))),
    "split": (_split, lambda a, b: (a * b)[:4] @ (a * b)[4:].T),
    "unbind": (_unbound, lambda a, b: (a * b)[2] + (a * b)[0].sin()),
    "sizes": (_sized, lambda a, b: (a * b)[3:] * 3),
    "optional": (_optional, lambda a, b: (a * b).sin()),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", ["torch", "onnxruntime"])
@pytest.mark.parametrize("case", CASES)
def test_gradient(case: str, name: str, symbolic: bool) -> None:
    write, reference = CASES[case]
    graph = _graph(write, symbolic)
    optimize(graph)
    assert not any("Sequence" in n.op_type or "Optional" in n.op_type for n in graph.model.graph)
    a, b = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    expected = reference(a, b)
    dy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (a, b), dy, allow_unused=True)
    executable = backend(name).compile(make_plan(build_gradient(graph)))
    (y,), saved = executable.forward([a.detach(), b.detach()])
    np.testing.assert_allclose(np.asarray(y), expected.detach(), rtol=1e-5, atol=1e-6)
    gradients = dict(zip(executable.plan.gradients, executable.backward(saved, [dy]), strict=True))
    for key, right in zip("ab", wanted, strict=True):
        np.testing.assert_allclose(np.asarray(gradients[key]), right, rtol=1e-4, atol=1e-5)


def test_length_and_presence_are_constants() -> None:
    def counted(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
        length = op.Cast(op.SequenceLength(op.SequenceConstruct(a, b)), to=1)
        return op.Mul(a, op.Where(op.OptionalHasElement(op.Optional(b)), length, op.Neg(length)))

    graph = _graph(counted)
    optimize(graph)
    (y,), _ = backend("torch").compile(make_plan(graph)).forward([torch.ones(6, 4), torch.ones(6, 4)])
    assert (y == 2).all()


class Parts(torch.nn.Module):
    """Splits of an axis whose size is not known."""

    def forward(self, x: Tensor) -> Tensor:
        """The first two parts of three rows each."""
        first, second, *_ = x.split(3)
        return first * second.sin()


@pytest.mark.parametrize("name", ["torch", "onnxruntime"])
def test_module(name: str) -> None:
    wrapped, eager = pair(Parts(), backend=name)
    same_step(wrapped, eager, torch.randn(8, 4, requires_grad=True))
