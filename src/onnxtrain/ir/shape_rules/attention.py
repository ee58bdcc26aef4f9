"""Attention's operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.shapes import Facts, dims_of, dtype_of, shape_rule


@shape_rule("RotaryEmbedding")
def rotary_embedding(node: ir.Node) -> Sequence[Facts]:
    """As the operand, double included."""
    x = node.inputs[0]
    assert x is not None
    return [Facts(dtype_of(x), dims_of(x))]
