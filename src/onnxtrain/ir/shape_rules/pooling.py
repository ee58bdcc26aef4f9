"""Pooling."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.convolution import transposed_sizes, window_of
from onnxtrain.ir.shape_rules.sizes import dims_from
from onnxtrain.ir.shapes import Facts, dtype_of, known_dims, operand, shape_rule


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


@shape_rule("MaxUnpool")
def max_unpool(node: ir.Node) -> Sequence[Facts]:
    """The stated shape, or the size of which the pooling would give the operand's."""
    x, stated = node.inputs[0], operand(node, 2)
    assert x is not None
    if stated is not None:
        return [Facts(dtype_of(x), dims_from(stated, node.outputs[0]))]
    dims = known_dims(x)
    return [Facts(dtype_of(x), (*dims[:2], *transposed_sizes(window_of(node, ()), dims[2:])))]


@shape_rule("MaxPoolGrad", domain=DOMAIN)
def max_pool_grad(node: ir.Node) -> Sequence[Facts]:
    """The shape is the third operand's content."""
    dy, _, shape = node.inputs
    assert dy is not None
    return [Facts(dtype_of(dy), dims_from(shape, node.outputs[0]))]


@shape_rule("AveragePoolGrad", "SumPoolGrad", domain=DOMAIN)
def sum_pool_grad(node: ir.Node) -> Sequence[Facts]:
    """The shape is the second operand's content."""
    dy, shape, _ = node.inputs
    assert dy is not None
    return [Facts(dtype_of(dy), dims_from(shape, node.outputs[0]))]
