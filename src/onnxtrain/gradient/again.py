"""The backward pass as a forward pass, to be differentiated again."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.functions import has_body
from onnxtrain.ir.graphs import BACKWARD, ForwardGraph, Signature, TrainingGraph
from onnxtrain.ir.standard_form import write_out


def gradients_as_outputs(training: TrainingGraph) -> ForwardGraph:
    """The gradients of a forward pass as the outputs of another one, which is differentiated like any other.

    Its user inputs are all inputs of the first, then the gradients of its outputs; it changes no buffer.
    """
    model = ir.Model(training.model.graph.clone(), ir_version=training.model.ir_version)
    kept = set(training.gradients.values())
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name in kept]
    remove_unread(model.graph)
    make_forward(model.graph)
    names = tuple(str(v.name) for v in model.graph.outputs)
    inputs = (*training.signature.inputs, *training.output_gradients.values())
    return ForwardGraph(model, Signature(inputs, (), (), names, {}))


def make_forward(graph: ir.Graph) -> None:
    """Make the backward pass in a graph part of its forward pass, which can be differentiated.

    Operators of ours are written out where the backward pass reads what they give besides their result: a rule takes
    no gradient of that.
    """
    for node in graph.all_nodes():
        node.meta.pop(BACKWARD, None)  # of bodies too: they are differentiated as a part of another backward pass
    for node in [n for n in graph if has_body(n) and any(v.uses() for v in n.outputs[1:])]:
        write_out(node)
