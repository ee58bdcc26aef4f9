"""Activations of one value that gate another, written out."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.shapes import attribute

Value = ir.Value


def swiglu(op: Builder, node: ir.Node) -> list[Value]:
    """ONNX's SwiGLU (opset 28): Swish of the gate times the other operand."""
    gate, value = node.inputs[:2]
    assert gate is not None and value is not None
    return [swish(op, gate, attribute(node, "alpha", 1.0)) * value]


def swish(op: Builder, x: Value, alpha: float = 1.0) -> Value:
    """``x * sigmoid(alpha * x)``."""
    return op.Silu(x) if alpha == 1.0 else x * op.Sigmoid(x * alpha)
