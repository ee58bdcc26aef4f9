"""Operators of torch: what the traced call returned, and the state of the random generator."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Facts, attribute, dims_of, fresh_dims, shape_rule


@shape_rule("ATen", domain=DOMAIN)
def aten(node: ir.Node) -> list[Facts]:
    """Types and shapes are stated by whoever made the node; after the results the random state, in bytes."""
    count = attribute(node, "results", 1)
    stated = [Facts(v.dtype or ir.DataType.UNDEFINED, dims_of(v)) for v in node.outputs[:count]]
    return stated + [Facts(ir.DataType.UINT8, fresh_dims(v, 1)) for v in node.outputs[count:]]
