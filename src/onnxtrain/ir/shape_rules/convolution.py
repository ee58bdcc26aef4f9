"""Convolution and pooling: spatial sizes stay expressions of the input's."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import (
    Dim,
    Dims,
    Facts,
    ask_onnx,
    attribute,
    dtype_of,
    known_dims,
    operand,
    shape_rule,
    simplify,
)


def _windowed(node: ir.Node, sizes: Dims, kernel: Dims) -> Dims | None:
    """``floor((size + pads - window) / stride) + 1`` for each axis; None where it is not as simple as that."""
    count = len(sizes)
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or attribute(node, "ceil_mode", 0):
        return None
    strides = attribute(node, "strides") or (1,) * count
    pads = attribute(node, "pads") or (0,) * 2 * count
    dilations = attribute(node, "dilations") or (1,) * count
    made: list[Dim] = []
    for i in range(count):
        window = kernel[i]
        if not isinstance(window, int):
            return None
        reach = sizes[i] + (pads[i] + pads[i + count] - (window - 1) * dilations[i] - 1)
        made.append(simplify(reach // strides[i] + 1))
    return tuple(made)


@shape_rule("Conv")
def conv(node: ir.Node) -> Sequence[Facts]:
    """(N, features, windows...)."""
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    dims, kernel = known_dims(x), known_dims(w)
    spatial = _windowed(node, dims[2:], kernel[2:])
    if spatial is None:
        return ask_onnx(node)
    return [Facts(dtype_of(x), (dims[0], kernel[0], *spatial))]


@shape_rule("ConvGrad", domain=DOMAIN)
def conv_grad(node: ir.Node) -> Sequence[Facts]:
    """As x, as w, and one number for each feature."""
    _, x, w = node.inputs
    assert x is not None and w is not None
    bias = Facts(dtype_of(w), known_dims(w)[:1])
    return [Facts(dtype_of(x), known_dims(x)), Facts(dtype_of(w), known_dims(w)), bias]


@shape_rule("MaxPool", "AveragePool")
def pool(node: ir.Node) -> Sequence[Facts]:
    """(N, C, windows...); the indices of MaxPool alike."""
    x = operand(node, 0)
    assert x is not None
    dims = known_dims(x)
    spatial = _windowed(node, dims[2:], tuple(attribute(node, "kernel_shape")))
    if spatial is None:
        return ask_onnx(node)
    shape = (*dims[:2], *spatial)
    return [Facts(dtype_of(x), shape), Facts(ir.DataType.INT64, shape)]
