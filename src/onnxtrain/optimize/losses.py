"""A loss and the output layer before it as one operator: the scores of a large vocabulary never exist at once."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import replace
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN

_CLASSES = 4096  # with fewer the scores are no larger than what is kept beside them
_LAYERS = ("Linear", "LinearWithoutBias")


class LinearLossPass(ir.passes.InPlacePass):
    """Cross entropy of a linear layer's scores, which nothing else reads, becomes LinearCrossEntropy."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            if node.domain == "" and node.op_type == "SoftmaxCrossEntropyLoss":
                modified |= _join(model.graph, node)
        return ir.passes.PassResult(model, modified)


def _join(graph: ir.Graph, node: ir.Node) -> bool:
    scores, labels = node.inputs[:2]
    layer = _layer(scores)
    reduction = shapes.attribute(node, "reduction", "mean")
    plain = len(node.inputs) == 2 and not any(o.uses() or o.is_graph_output() for o in node.outputs[1:])
    if layer is None or labels is None or scores is None or not plain or reduction == "none":
        return False
    if shapes.rank(labels) != 1 or "ignore_index" not in node.attributes or not _is_large(layer):
        return False
    x, weight, *bias = layer.inputs
    assert x is not None and weight is not None
    op = Builder(graph, before=node)
    op.metadata = dict(node.metadata_props)
    if shapes.rank(x) != 2:
        width = shapes.known_dims(weight)[1]
        if not isinstance(width, int):
            return False
        x = op.Reshape(x, op.ints(-1, width))
    ignored = node.attributes["ignore_index"].as_int()
    loss = op.LinearCrossEntropy(
        x, weight, bias[0] if bias else None, labels, ignore_index=ignored, reduction=reduction
    )
    replace(graph, node, [op.cast(loss, shapes.dtype_of(node.outputs[0]))])
    return True


def _layer(scores: ir.Value | None) -> ir.Node | None:
    """The linear layer that scores come from, through views and a cast to float that nothing else reads."""
    while scores is not None and len(scores.uses()) == 1 and not scores.is_graph_output():
        node = scores.producer()
        if node is None:
            return None
        if node.domain == DOMAIN and node.op_type in _LAYERS:
            return node
        widens = node.op_type == "Cast" and node.attributes["to"].as_int() == int(ir.DataType.FLOAT)
        if node.domain or not (widens or (node.op_type == "Reshape" and _keeps_classes(node))):
            return None
        scores = node.inputs[0]
    return None


def _keeps_classes(node: ir.Node) -> bool:
    x, y = node.inputs[0], node.outputs[0]
    return x is not None and shapes.known_dims(x)[-1:] == shapes.known_dims(y)[-1:]


def _is_large(layer: ir.Node) -> bool:
    weight = layer.inputs[1]
    classes = shapes.known_dims(weight)[0] if weight is not None else None
    return isinstance(classes, int) and classes >= _CLASSES
