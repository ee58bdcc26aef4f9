"""Backward passes within a forward pass (``torch.autograd.grad``), in the place of the nodes that stand for them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.gradient.again import make_forward
from onnxtrain.gradient.build import Walk, write_out_without_rule
from onnxtrain.gradient.registry import rule_of
from onnxtrain.ir.bodies import replace
from onnxtrain.ir.expansions import expand_nodes
from onnxtrain.ir.functions import is_inner_gradient
from onnxtrain.ir.graphs import ForwardGraph, describe, source_of


def write_out_inner(graph: ForwardGraph) -> None:
    """Put the nodes of a backward pass in the place of each node that stands for one, as part of the forward pass.

    Raises:
        GradientError: an operator on the way has no gradient, or an input is not used where it has to be.
    """
    if not any(map(is_inner_gradient, graph.model.graph)):
        return
    graph.model = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version)
    while any(map(is_inner_gradient, graph.model.graph)):
        graph.model = expand_nodes(graph.model, lambda node: is_inner_gradient(node) or rule_of(node) is not None)
        _write_out(graph.model.graph, next(filter(is_inner_gradient, graph.model.graph)))
        make_forward(graph.model.graph)


def _write_out(graph: ir.Graph, node: ir.Node) -> None:
    count = node.attributes["count"].as_int()
    write_out_without_rule(graph, [v for v in node.inputs[2 * count :] if v is not None])
    values = [v for v in node.inputs if v is not None]  # some of which others have taken the place of
    outputs, seeds, inputs = values[:count], values[count : 2 * count], values[2 * count :]
    walk = Walk(graph, inputs, before=node)
    for output, seed in zip(outputs, seeds, strict=True):
        if output in walk.active:
            walk.contribute(output, seed)
    walk.run()
    walk.op.metadata = dict(node.metadata_props)
    if not {*inputs} <= walk.contributions.keys() and not node.attributes["allow_unused"].as_int():
        raise GradientError(
            "one of the tensors that torch.autograd.grad differentiates by is not used in what it differentiates",
            node=describe(node),
            source=source_of(node),
            cure="say allow_unused=True if this is meant; its gradient is then zeros",
        )
    with walk.op.arithmetic():
        zeros = {
            x: walk.op.Expand(walk.op.like(0.0, x), walk.op.shape(x)) for x in inputs if x not in walk.contributions
        }
    replace(graph, node, [walk.contributions.get(x, zeros.get(x)) for x in inputs])
