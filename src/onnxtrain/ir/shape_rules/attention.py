"""Attention's operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.shapes import (
    Facts,
    attribute,
    dims_of,
    dtype_of,
    known_dims,
    operand,
    product,
    quotient,
    shape_rule,
    simplify,
)


@shape_rule("RotaryEmbedding")
def rotary_embedding(node: ir.Node) -> Sequence[Facts]:
    """As the operand, double included."""
    x = node.inputs[0]
    assert x is not None
    return [Facts(dtype_of(x), dims_of(x))]


@shape_rule("LinearAttention")
def linear_attention(node: ir.Node) -> Sequence[Facts]:
    """A head of values for each head of queries; the state is as wide as a key, and as a value."""
    query, value = node.inputs[0], node.inputs[2]
    assert query is not None and value is not None
    batch, length, width = known_dims(query)
    queries, count = attribute(node, "q_num_heads"), attribute(node, "kv_num_heads")
    size = quotient(known_dims(value)[-1], count)
    state = (batch, count, quotient(width, queries), size)
    past = operand(node, 3) or query
    return [Facts(dtype_of(query), (batch, length, product((queries, size)))), Facts(dtype_of(past), state)]


@shape_rule("CausalConvWithState")
def causal_convolution(node: ir.Node) -> Sequence[Facts]:
    """As the operand; the state has one column less than the kernel."""
    x, weight = node.inputs[:2]
    assert x is not None and weight is not None
    size = simplify(known_dims(weight)[2] - 1)  # type: ignore[operator]
    return [Facts(dtype_of(x), known_dims(x)), Facts(dtype_of(x), (*known_dims(x)[:2], size))]
