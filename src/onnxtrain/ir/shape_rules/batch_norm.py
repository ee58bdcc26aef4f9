"""Batch normalization."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.shapes import Facts, dims_of, dtype_of, shape_rule


@shape_rule("BatchNormalization")
def batch_normalization(node: ir.Node) -> Sequence[Facts]:
    """As the operand; in training mode also the running mean and variance."""
    models = [v for v in (node.inputs[0], *node.inputs[3:]) if v is not None]
    return [Facts(dtype_of(v), dims_of(v)) for v in models]
