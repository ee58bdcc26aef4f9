"""Operators on rows without padding: what they take out has as many rows as there are row numbers."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.sizes import dims_from
from onnxtrain.ir.shapes import Facts, dtype_of, fresh_dims, known_dims, shape_rule


@shape_rule("ShrunkenGather", domain=DOMAIN)
def shrunken_gather(node: ir.Node) -> Sequence[Facts]:
    """(T, ...) of (N, ...)."""
    x, indices = node.inputs
    assert x is not None and indices is not None
    return [Facts(dtype_of(x), (*known_dims(indices), *known_dims(x)[1:]))]


@shape_rule("ShrunkenGatherGrad", domain=DOMAIN)
def shrunken_gather_grad(node: ir.Node) -> Sequence[Facts]:
    """The shape that the last operand holds."""
    dy, _, shape = node.inputs
    assert dy is not None
    return [Facts(dtype_of(dy), dims_from(shape, node.outputs[0]))]


@shape_rule("PackedDropout", domain=DOMAIN)
def packed_dropout(node: ir.Node) -> Sequence[Facts]:
    """The result and its mask, both of the operand's shape."""
    x = node.inputs[0]
    assert x is not None
    return [Facts(dtype_of(x), known_dims(x)), Facts(ir.DataType.BOOL, known_dims(x))]


@shape_rule("FlattenAndUnpad", domain=DOMAIN)
def flatten_and_unpad(node: ir.Node) -> Sequence[Facts]:
    """(T, ...) of (B, S, ...); and B and S."""
    x, rows = node.inputs
    assert x is not None and rows is not None
    dims = known_dims(x)
    return [
        Facts(dtype_of(x), (*known_dims(rows), *dims[2:])),
        Facts(ir.DataType.INT64, (2,), dims[:2]),
    ]


@shape_rule("PadAndUnflatten", domain=DOMAIN)
def pad_and_unflatten(node: ir.Node) -> Sequence[Facts]:
    """(B, S, ...) of (T, ...), as the last operand says."""
    x, _, shape = node.inputs
    assert x is not None
    first = dims_from(shape, node.outputs[0]) or fresh_dims(node.outputs[0], 2)
    return [Facts(dtype_of(x), (*first, *known_dims(x)[1:]))]


@shape_rule("PackedAttention", domain=DOMAIN)
def packed_attention(node: ir.Node) -> Sequence[Facts]:
    """(Tq, heads, e) of q (Tq, heads, d) and v (Tk, heads, e); one log-sum-exp for each query, float32 at least.

    How much dropout keeps is known only at run time.
    """
    q, v = node.inputs[0], node.inputs[2]
    assert q is not None and v is not None
    rows, dtype = known_dims(q)[:2], dtype_of(q)
    precise = ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype
    made = [Facts(dtype, (*rows, known_dims(v)[2])), Facts(precise, rows)]
    if len(node.outputs) > 2:
        made.append(Facts(ir.DataType.BOOL, fresh_dims(node.outputs[2], 1)))
    return made
