"""Pooling."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.convolution import window_of
from onnxtrain.ir.shape_rules.sizes import dims_from
from onnxtrain.ir.shapes import Facts, dtype_of, known_dims, shape_rule


@shape_rule("MaxPool", "AveragePool", "LpPool")
def pool(node: ir.Node) -> Sequence[Facts]:
    """One size for each place of the window; the second output holds the maxima's indices."""
    x = node.inputs[0]
    assert x is not None
    dims = known_dims(x)
    made = (*dims[:2], *window_of(node, ()).output_sizes(dims[2:]))
    return [Facts(dtype_of(x), made), Facts(ir.DataType.INT64, made)]


@shape_rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(node: ir.Node) -> Sequence[Facts]:
    """Spatial sizes become 1."""
    x = node.inputs[0]
    assert x is not None
    dims = known_dims(x)
    return [Facts(dtype_of(x), (*dims[:2], *(1,) * (len(dims) - 2)))]


@shape_rule("MaxPoolGrad", domain=DOMAIN)
def max_pool_grad(node: ir.Node) -> Sequence[Facts]:
    """The shape is the third operand's content."""
    dy, _, shape = node.inputs
    assert dy is not None
    return [Facts(dtype_of(dy), dims_from(shape, node.outputs[0]))]


@shape_rule("AveragePoolGrad", domain=DOMAIN)
def average_pool_grad(node: ir.Node) -> Sequence[Facts]:
    """The shape is the second operand's content."""
    dy, shape, _ = node.inputs
    assert dy is not None
    return [Facts(dtype_of(dy), dims_from(shape, node.outputs[0]))]
