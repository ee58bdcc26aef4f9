"""An ``.onnx`` model as a ForwardGraph: functions and fused operators written out, weights as inputs, shapes inferred.

Nothing is folded or left out, and inputs, outputs and initializers keep their names. The order matters: the opset is
raised in ONNX's own form, and what is trained becomes an input before bodies are closed, which copies constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxtrain.errors import GraphError, OnnxTrainError, first_line
from onnxtrain.ir import functions, shapes
from onnxtrain.ir.bodies import bodies_of, close_bodies, is_closed
from onnxtrain.ir.expansions import can_expand, is_fused, write_out
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Signature, describe
from onnxtrain.ir.opsets import LOWEST, convert, raise_opset, version_of
from onnxtrain.ir.verify import operator_problems, verify

Source: TypeAlias = Path | str | onnx.ModelProto | ir.Model

_FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FILE_FORMAT = 10  # at least: initializers of older ones are inputs, too
_SETTINGS = {  # inputs that are floating and no weights
    "Resize": (1, 2),
    "BatchNormalization": (3, 4),
    "QuantizeLinear": (1,),
    "DequantizeLinear": (1,),
}


def read_forward(source: Source, parameters: Sequence[str] = ()) -> ForwardGraph:
    """The forward pass that a model holds, to be differentiated by its parameters.

    Args:
        source: the ``.onnx`` file, or the model itself, which is not changed. Data beside a file is found from there.
        parameters: names or patterns (``"encoder.*"``) of the floating constants to train: of initializers, those of
            bodies too, and of ``Constant`` nodes, by the name of their output. Where there is none, all floating
            initializers that have dimensions, but for the sizes of Resize, scales of quantization and the statistics of
            BatchNormalization.

    Raises:
        GraphError: the model cannot be read, its opset cannot be brought to one that graphs use, or it has no such
            constant; the message names the file.
    """
    with _named(source):
        model = _prepared(load(source))
        return _forward(model, _to_inputs(model.graph, parameters))


def read_weights(source: Source, more: Sequence[str] = ()) -> tuple[ForwardGraph, dict[str, ir.TensorProtocol]]:
    """The forward pass that a model holds with all its weights as inputs, and what they contain.

    Weights are the floating initializers that have dimensions, but for the sizes of Resize and scales of quantization;
    statistics of BatchNormalization are among them. None of them is differentiated yet.

    Args:
        source: as for ``read_forward``.
        more: names of initializers that are weights as well.

    Raises:
        GraphError: as there.
    """
    with _named(source):
        model = _prepared(load(source))
        held = [v for n, v in model.graph.initializers.items() if _is_weight(v) or _is_statistic(v) or n in more]
        content = {str(v.name): v.const_value for v in held if v.const_value is not None}
        graph = _forward(model, tuple(_to_input(model.graph, v, model.graph) for v in held))
        return ForwardGraph(graph.model, dataclasses.replace(graph.signature, differentiable=())), content


def restore_weights(model: ir.Model, weights: Mapping[str, ir.TensorProtocol]) -> None:
    """Turn inputs that are weights back into initializers, in place."""
    for value in [v for v in model.graph.inputs if v.name in weights]:
        value.const_value = weights[str(value.name)]
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)


def _is_statistic(value: ir.Value) -> bool:
    """Whether a value is a running statistic of BatchNormalization."""
    return any(use.node.op_type == "BatchNormalization" and use.idx in (3, 4) for use in value.uses())


def _forward(model: ir.Model, chosen: tuple[str, ...]) -> ForwardGraph:
    """A model, whose inputs ``chosen`` are weights, with closed bodies and all types and shapes."""
    graph = model.graph
    close_bodies(graph)
    verify(model, operators=False)
    _write_out(graph)
    kept = {*graph.initializers, *chosen}
    inputs = tuple(str(v.name) for v in graph.inputs if v.name not in kept)
    ordered = {str(v.name): v for v in graph.inputs}
    graph.inputs.clear()
    graph.inputs.extend(ordered[name] for name in (*inputs, *chosen))
    outputs = tuple(str(v.name) for v in graph.outputs)
    return ForwardGraph(model, Signature(inputs, chosen, (), outputs, {}, chosen))


@contextlib.contextmanager
def _named(source: Source) -> Iterator[None]:
    """Whatever goes wrong is one GraphError that names the file."""
    name = str(source) if isinstance(source, str | os.PathLike) else "the model"
    try:
        yield
    except OnnxTrainError as error:
        what = f"{name}: {error.what}"
        raise GraphError(what, node=error.node, source=error.source, cure=error.cure) from error
    except Exception as error:  # protobuf, numpy, onnx and onnx_ir raise many types for a file that is damaged
        raise GraphError(
            f"{name} cannot be read: {first_line(error)}", cure="give an .onnx file that onnx.checker accepts"
        ) from error


def load(source: Source) -> ir.Model:
    """The model itself, as it is; what is made of it does not change what was given."""
    if isinstance(source, ir.Model):
        return source.clone()
    return ir.from_proto(source) if isinstance(source, onnx.ModelProto) else ir.load(source)


def _prepared(model: ir.Model) -> ir.Model:
    """The model without functions, in the form of the opset that rules speak; every node a valid call."""
    _inline_functions(model)
    if version_of(model.graph) < LOWEST:
        model = convert(model)
    raise_opset(model.graph)
    model.ir_version = max(model.ir_version, _FILE_FORMAT)
    for node in model.graph.all_nodes():
        for problem in operator_problems(node, model.graph.opset_imports):
            raise GraphError(problem, node=describe(node))
    for tensor in _tensors(model.graph):
        tensor.numpy()  # fails where there is less data than the shape says
    return model


def _inline_functions(model: ir.Model) -> None:
    """Calls of the model's own functions become their nodes; those of ours stay, as their bodies are known."""
    for key in [k for k in model.functions if k[0] == DOMAIN and functions.defines(k[1])]:
        del model.functions[key]
    for function in model.functions.values():
        version = function.opset_imports.get("")
        for node in function.all_nodes() if version else ():
            node.version = version if node.domain == "" else node.version
        for domain in {*function.opset_imports} & {*model.graph.opset_imports}:
            function.opset_imports[domain] = model.graph.opset_imports[domain]
    InlinePass()(model)
    model.functions.clear()


def _tensors(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    for inner in _graphs(graph):
        yield from (v.const_value for v in inner.initializers.values() if v.const_value is not None)
        for node in inner:
            yield from (a.as_tensor() for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR)


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """The graph and all bodies in it."""
    yield graph
    for node in graph:
        for body in bodies_of(node):
            yield from _graphs(body)


def _write_out(graph: ir.Graph) -> None:
    """Infer all shapes, and put ONNX's operators in the place of those that onnxruntime's optimizers made of them."""
    for node in list(graph):
        if is_fused(node) and can_expand(node):
            write_out(graph, node)
            continue
        shapes.infer(node)
        if is_closed(node):
            for body in bodies_of(node):
                _write_out(body)
            shapes.infer(node)


def _to_inputs(graph: ir.Graph, patterns: Sequence[str]) -> tuple[str, ...]:
    """Turn the constants to train into inputs of the outermost graph; says their names."""
    initializers = [(v, g) for g in _graphs(graph) for v in g.initializers.values()]
    constants = [
        (n.outputs[0], g) for g in _graphs(graph) for n in g if n.op_type == "Constant" and n.domain == "" and n.outputs
    ]
    if patterns:
        chosen = _matching([*initializers, *constants], patterns)
    else:
        chosen = [(v, g) for v, g in initializers if _is_weight(v)]
    return tuple(_to_input(graph, value, holder) for value, holder in chosen)


def _is_weight(value: ir.Value) -> bool:
    """Whether an initializer is one to train where nobody says which."""
    settings = all(use.idx in _SETTINGS.get(use.node.op_type, ()) for use in value.uses())
    return value.dtype in _FLOATING and bool(value.shape) and not (settings and value.uses())


def _matching(known: list[tuple[ir.Value, ir.Graph]], patterns: Sequence[str]) -> list[tuple[ir.Value, ir.Graph]]:
    """The constants that are floating and match a pattern."""
    floating = [pair for pair in known if _is_floating(pair[0])]
    found = {p: [pair for pair in floating if fnmatch.fnmatchcase(str(pair[0].name), p)] for p in patterns}
    if missing := [p for p, pairs in found.items() if not pairs]:
        other = any(fnmatch.fnmatchcase(str(value.name), missing[0]) for value, _ in known)
        what = f"{missing[0]} is not floating" if other else f"no initializer is called {missing[0]}"
        raise GraphError(what, cure="name floating initializers of the model")
    return list(dict.fromkeys(pair for pairs in found.values() for pair in pairs))


def _is_floating(value: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.dtype in _FLOATING


def _to_input(graph: ir.Graph, value: ir.Value, holder: ir.Graph) -> str:
    """Turn one constant that a graph or body holds into an input of the outermost graph; says its name."""
    node = value.producer()
    if node is not None:
        made = ir.Value(name=value.name, type=value.type, shape=value.shape)
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        made.type, made.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        value.replace_all_uses_with(made, replace_graph_outputs=True)
        holder.remove(node, safe=True)
        value = made
    else:
        holder.initializers.pop(str(value.name))
        value.const_value = None
    if value not in graph.inputs:
        taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
        base, count = value.name, 1
        while value.name in taken:  # two bodies may call different weights the same
            value.name, count = f"{base}_{count}", count + 1
        graph.inputs.append(value)
    return str(value.name)
