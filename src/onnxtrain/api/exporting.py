"""The part of an evaluation model that predicts, with weights inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError, close_to
from onnxtrain.ir.reading import restore_weights


def inference_model(model: onnx.ModelProto, names: Sequence[str], weights: Mapping[str, np.ndarray]) -> ir.Model:
    """What some values of a model need, with weights as initializers.

    Args:
        model: the evaluation model; it is not changed.
        names: values that become the outputs.
        weights: content of the inputs that are weights.

    Raises:
        ArtifactError: the model has no such value; close names are listed.
    """
    known = {o for n in model.graph.node for o in n.output} | {i.name for i in model.graph.input}
    for name in names:
        if name not in known:
            raise ArtifactError(
                f"the evaluation model has no value {name}{close_to(name, known)}", cure="name another in output_names"
            )
    needed, nodes = set(names), []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed |= {*node.input, *captured(node)}
    infos = {v.name: v for v in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(reversed(nodes))
    graph.input.extend(i for i in model.graph.input if i.name in needed)
    graph.output.extend(infos.get(n, onnx.ValueInfoProto(name=n)) for n in names)
    graph.initializer.extend(i for i in model.graph.initializer if i.name in needed)
    graph.value_info.extend(v for v in model.graph.value_info if v.name in needed and v.name not in names)
    called = {(n.domain, n.op_type) for n in nodes}
    made = onnx.ModelProto(ir_version=model.ir_version, producer_name="onnxtrain", graph=graph)
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions if any(d for d, _ in called) else ())
    exported = ir.from_proto(made)  # weights may be larger than what a proto can hold
    restore_weights(exported, {n: ir.tensor(a, name=n) for n, a in weights.items() if n in needed})
    return exported


def captured(node: onnx.NodeProto) -> set[str]:
    """Names that the bodies of a node read."""
    bodies = [a.g for a in node.attribute if a.HasField("g")]
    read = {name for body in bodies for inner in body.node for name in (*inner.input, *captured(inner))}
    return read | {output.name for body in bodies for output in body.output}
