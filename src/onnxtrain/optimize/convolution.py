"""Convolutions that are matrix products: a kernel of one element along one axis, as the projections of LoRA have."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import replace
from onnxtrain.ir.builder import Builder

_MOST_GROUPS = 8  # beyond, on a CPU, as many small products are slower than one convolution with groups


class ConvolutionsPass(ir.passes.InPlacePass):
    """A one-dimensional Conv with a kernel of 1 becomes one MatMul for each of its groups.

    The input is split by groups along its channels, the weight (without its last axis) along its rows; the products,
    weight on the left, come side by side. The bias is added at the end. Sums may be rounded in another order.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            if node.domain == "" and node.op_type == "Conv" and _is_product(node):
                _rewrite(model.graph, node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _is_product(node: ir.Node) -> bool:
    """Whether every element of the output reads one place of the input: kernel and strides 1, and no padding."""
    x, weight = node.inputs[:2]
    dims = None if weight is None else shapes.dims_of(weight)
    if x is None or dims is None or len(dims) != 3 or dims[2] != 1 or not isinstance(dims[0], int):
        return False
    group = shapes.attribute(node, "group", 1)
    if not 0 < group <= _MOST_GROUPS or dims[0] % group or not isinstance(dims[1], int):
        return False
    if any(s != 1 for s in shapes.attribute(node, "strides", ())):
        return False
    return not any(shapes.attribute(node, "pads", ()))  # auto_pad and dilations change nothing for a kernel of 1


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    op = Builder(graph, before=node)
    op.metadata = dict(node.metadata_props)
    x, weight, bias = (shapes.operand(node, i) for i in range(3))
    group = shapes.attribute(node, "group", 1)
    matrix = op.Squeeze(weight, op.ints(2))
    if group == 1:
        y = op.MatMul(matrix, x)
    else:
        rows, channels = shapes.known_dims(matrix)
        inputs = op.Split(x, op.ints(*[int(channels)] * group), axis=1, outputs=group)  # type: ignore[arg-type]
        weights = op.Split(matrix, op.ints(*[int(rows) // group] * group), axis=0, outputs=group)  # type: ignore[arg-type]
        y = op.Concat(*(op.MatMul(w, part) for w, part in zip(weights, inputs, strict=True)), axis=1)
    if bias is not None:
        y = op.Add(y, op.Unsqueeze(bias, op.ints(1)))
    replace(graph, node, [y])
