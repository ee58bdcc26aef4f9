"""An ``.onnx`` file as a ForwardGraph: weights become inputs, the opset one that graphs use, shapes inferred."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from onnxtrain.errors import GraphError, first_line
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.options import OPSETS

_FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def read_forward(path: Path, parameters: Sequence[str] = ()) -> ForwardGraph:
    """The forward pass that a file holds, to be differentiated by its parameters.

    Args:
        path: the ``.onnx`` file.
        parameters: names or patterns (``"encoder.*"``) of the initializers to train; where there is none, all
            floating ones that have dimensions.

    Raises:
        GraphError: the file cannot be read, its opset cannot be brought to one that graphs use, or it has no such
            initializer.
    """
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf raises many types
        raise GraphError(f"{path} cannot be read: {first_line(error)}", cure="give an .onnx file") from error
    model = _current_opset(model, str(path))
    graph = model.graph
    chosen = _chosen(graph, parameters)
    for name in chosen:
        value = graph.initializers.pop(name)
        value.const_value = None
        if value not in graph.inputs:
            graph.inputs.append(value)
    shapes.infer_graph(graph)
    taken = {*graph.initializers, *chosen}
    inputs = tuple(str(v.name) for v in graph.inputs if v.name not in taken)
    ordered = {str(v.name): v for v in graph.inputs}
    graph.inputs.clear()
    graph.inputs.extend(ordered[name] for name in (*inputs, *chosen))
    outputs = tuple(str(v.name) for v in graph.outputs)
    return ForwardGraph(model, Signature(inputs, chosen, (), outputs, {}, chosen))


def _chosen(graph: ir.Graph, patterns: Sequence[str]) -> tuple[str, ...]:
    if not patterns:
        return tuple(n for n, v in graph.initializers.items() if v.dtype in _FLOATING and v.shape and len(v.shape))
    found = {p: [n for n in graph.initializers if fnmatch.fnmatchcase(n, p)] for p in patterns}
    if missing := [p for p, names in found.items() if not names]:
        raise GraphError(f"no initializer is called {missing[0]}", cure="name initializers of the model")
    return tuple(dict.fromkeys(n for names in found.values() for n in names))


def _current_opset(model: ir.Model, path: str) -> ir.Model:
    version = model.graph.opset_imports.get("", min(OPSETS))
    if version in OPSETS:
        return model
    if version > max(OPSETS):
        raise GraphError(f"{path} has opset {version}", cure=f"export it with opset {max(OPSETS)}")
    from onnxscript import version_converter

    try:
        version_converter.convert_version(model, min(OPSETS), fallback=True)
    except Exception as error:  # the converter of onnx raises many types
        raise GraphError(
            f"{path} has opset {version} and cannot be brought to {min(OPSETS)}: {first_line(error)}",
            cure=f"export it with opset {min(OPSETS)}",
        ) from error
    if model.graph.opset_imports.get("") != min(OPSETS):
        raise GraphError(
            f"{path} has opset {version} and cannot be brought to {min(OPSETS)}",
            cure=f"export it with opset {min(OPSETS)}",
        )
    return model
