"""The backward pass as a forward pass, to be differentiated again."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import functions
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.graphs import BACKWARD, ForwardGraph, Signature, TrainingGraph
from onnxtrain.ir.standard_form import write_out


def gradients_as_outputs(training: TrainingGraph) -> ForwardGraph:
    """The gradients of a forward pass as the outputs of another one, which is differentiated like any other.

    Its user inputs are all inputs of the first, then the gradients of its outputs; it changes no buffer. Operators of
    ours are written out where the backward pass reads what they give besides their result: a rule takes no gradient
    of that.
    """
    model = ir.Model(training.model.graph.clone(), ir_version=training.model.ir_version)
    for node in model.graph.all_nodes():
        node.meta.pop(BACKWARD, None)
    kept = set(training.gradients.values())
    model.graph.outputs[:] = [v for v in model.graph.outputs if v.name in kept]
    remove_unread(model.graph)
    for node in [n for n in model.graph if functions.has_body(n) and any(v.uses() for v in n.outputs[1:])]:
        write_out(node)
    names = tuple(str(v.name) for v in model.graph.outputs)
    inputs = (*training.signature.inputs, *training.output_gradients.values())
    return ForwardGraph(model, Signature(inputs, (), (), names, {}))
