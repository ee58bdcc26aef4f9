"""Operators that can be written out in simpler ones: where no gradient rule, or no kernel of a backend, knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from onnxtrain.ir import contrib, linear_models
from onnxtrain.ir.attention import attention, rotary_embedding, tensor_scatter
from onnxtrain.ir.bodies import BODY, bodies_of, inline, is_closed, replace
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.gates import swiglu
from onnxtrain.ir.graphs import DOMAIN, is_backward
from onnxtrain.ir.linear_attention import causal_convolution, linear_attention
from onnxtrain.ir.recurrent import RECURRENT, expand_node
from onnxtrain.ir.signals import short_time_fourier_transform

EXPANSIONS: dict[str, Callable[[Builder, ir.Node], list[ir.Value]]] = {
    **dict.fromkeys(RECURRENT, expand_node),
    "Attention": attention,
    "RotaryEmbedding": rotary_embedding,
    "TensorScatter": tensor_scatter,
    "LinearAttention": linear_attention,
    "CausalConvWithState": causal_convolution,
    "SwiGLU": swiglu,
    "STFT": short_time_fourier_transform,
    "SimplifiedLayerNormalization": contrib.simplified_layer_normalization,  # onnxruntime's, in the domain of ONNX
}
TABLES = {"": EXPANSIONS, contrib.DOMAIN: contrib.CONTRIB, linear_models.DOMAIN: linear_models.LINEAR_MODELS}


def expand_nodes(model: ir.Model, kept: Callable[[ir.Node], bool]) -> ir.Model:
    """A copy of the model with all nodes written out that can be, those that carry a body too, but for the kept.

    The model itself comes back where there is nothing to do.
    """
    if not any(can_expand(n) and not kept(n) for g in graphs_of(model.graph) for n in g):
        return model
    model = model.clone()
    for graph in list(graphs_of(model.graph)):
        for node in [n for n in graph if can_expand(n) and not kept(n)]:
            write_out(graph, node)
    return model


def write_out(graph: ir.Graph, node: ir.Node) -> None:
    """Put simpler nodes in the place of one that ``can_expand``, with types and shapes."""
    if BODY in node.attributes:
        inline(graph, node)
        return
    op = Builder(graph, before=node, backward=is_backward(node))
    op.metadata = dict(node.metadata_props)
    with op.arithmetic():
        replace(graph, node, TABLES[node.domain][node.op_type](op, node))


def can_expand(node: ir.Node) -> bool:
    """Whether a node can be written out in simpler ones."""
    carried = node.domain == DOMAIN and BODY in node.attributes and not is_closed(node)
    return carried or node.op_type in TABLES.get(node.domain, ())


def is_fused(node: ir.Node) -> bool:
    """Whether a node of another domain, or of onnxruntime's optimizers, stands for simpler ones that ONNX has."""
    return node.domain in (contrib.DOMAIN, linear_models.DOMAIN) or (node.domain, node.op_type) == (
        "",
        "SimplifiedLayerNormalization",
    )


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """The graph and all closed bodies in it."""
    yield graph
    for node in graph:
        for body in bodies_of(node) if is_closed(node) else ():
            yield from graphs_of(body)
