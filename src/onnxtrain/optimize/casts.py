"""Casts of parameters leave the graph: gradient accumulation then casts once for all its steps."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.ir.graphs import Cast, TrainingGraph


def hoist_casts(graph: TrainingGraph) -> None:
    """Every ``Cast`` of a parameter becomes an input of the graph, listed in its signature, for the caller to keep."""
    parameters = set(graph.signature.parameters)
    found: dict[str, Cast] = {}
    outputs = set(graph.model.graph.outputs)
    for node in list(graph.model.graph):
        source = node.inputs[0] if node.domain == "" and node.op_type == "Cast" else None
        if source is None or source.name not in parameters or node.outputs[0] in outputs:
            continue
        old = node.outputs[0]
        value = ir.Value(name=f"{source.name}_{ir.DataType(node.attributes['to'].as_int()).name.lower()}")
        value.type, value.shape = old.type, old.shape
        if value.name in found:
            value = next(v for v in graph.model.graph.inputs if v.name == value.name)
        else:
            found[str(value.name)] = Cast(str(source.name), node.attributes["to"].as_int())
            graph.model.graph.inputs.insert(len(graph.signature.inputs) + len(found) - 1, value)
        old.replace_all_uses_with(value)
        graph.model.graph.remove(node, safe=True)
    graph.signature = dataclasses.replace(graph.signature, casts=found)
