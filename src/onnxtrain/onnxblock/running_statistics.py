"""Running statistics of BatchNormalization, which a training model gives back as batches change them."""

from __future__ import annotations

import itertools

import onnx_ir as ir

from onnxtrain.artifact_names import updated
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.onnxblock.base import Base


def give_statistics(graph: ir.Graph, batch_statistics: bool) -> dict[str, str]:
    """Make the running statistics that batches change outputs of the graph; says input and output by name.

    Args:
        graph: the forward pass.
        batch_statistics: every BatchNormalization takes the statistics of the batch. The running variance is then
            PyTorch's, of unbiased variances; that of a node in ONNX's training mode is of the population's.
    """
    latest: dict[ir.Value, ir.Value] = {}
    following = dict(itertools.pairwise([*graph, None]))
    for node in [n for n in graph if n.op_type == "BatchNormalization" and n.domain == ""]:
        if batch_statistics:
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        if not shapes.attribute(node, "training_mode", 0):
            continue
        node.resize_outputs(3)
        for new in node.outputs[1:]:
            new.name = new.name or f"{node.outputs[0].name}__{new.index()}"
        shapes.infer(node)
        for index, new in ((3, node.outputs[1]), (4, node.outputs[2])):
            old = node.inputs[index]
            if old is None or not old.is_graph_input():
                continue
            if old in latest:  # a layer that is called twice moves its statistics twice
                node.replace_input_with(index, Builder(graph, before=node).Detach(latest[old]))
            latest[old] = new
            if batch_statistics and index == 4:
                latest[old] = _unbiased(graph, node, following[node])
    base = Base(ir.Model(graph, ir_version=10))
    return {str(old.name): base.output(new, updated(str(old.name))) for old, new in latest.items()}


def _unbiased(graph: ir.Graph, node: ir.Node, following: ir.Node | None) -> ir.Value:
    """The running variance of unbiased variances: with n elements in a channel, r = n / (n - 1) times the population's.

    It is r · (momentum · (old / r) + (1 - momentum) · population's): onnxruntime writes the node's result over what it
    reads, so nothing may read that later. Where n is 1, the variance of the batch is 0 either way.
    """
    op, (x, old, new) = Builder(graph, before=node), (node.inputs[0], node.inputs[4], node.outputs[2])
    assert x is not None and old is not None
    count = op.cast(op.share(x, old), shapes.dtype_of(old))
    ratio = op.Div(count, op.Max(op.Sub(count, 1.0), 1.0))
    node.replace_input_with(4, op.Div(old, ratio))
    return Builder(graph, before=following).Mul(new, ratio)
