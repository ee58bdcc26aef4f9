"""Gradients that are added to one another without a copy of each."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, is_backward


class EmbeddingSumPass(ir.passes.InPlacePass):
    """The gradient of a table is added row by row to what else the table receives, as a tied output layer's.

    Alone it would be a table of its own, zeros but for a few rows, and the sum a third.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            if node.domain == "" and node.op_type == "Add" and is_backward(node):
                modified |= _join(model.graph, node)
        return ir.passes.PassResult(model, modified)


def _join(graph: ir.Graph, node: ir.Node) -> bool:
    for index, value in enumerate(node.inputs):
        made, other = None if value is None else value.producer(), node.inputs[1 - index]
        if made is None or made.op_type != "EmbeddingGrad" or made.domain != DOMAIN or other is None:
            continue
        if value is None or len(value.uses()) != 1 or value.is_graph_output() or value.shape != other.shape:
            continue
        op = Builder(graph, before=node, backward=True)
        op.metadata = dict(made.metadata_props)
        dy, indices = made.inputs[:2]
        total = op.AddEmbeddingGrad(other, dy, indices, padding_idx=made.attributes["padding_idx"].as_int())
        y = node.outputs[0]
        total.name, y.name = y.name, f"{y.name}_sum"
        y.replace_all_uses_with(total, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        return True
    return False
