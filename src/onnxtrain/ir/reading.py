"""An ``.onnx`` model as a ForwardGraph: functions and fused operators written out, weights as inputs, shapes inferred.

Nothing is folded or left out, and inputs, outputs and initializers keep their names. The order matters: the opset is
raised in ONNX's own form, and what is trained becomes an input before bodies are closed, which copies constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxtrain.errors import GraphError, OnnxTrainError, first_line
from onnxtrain.files import check_file, memory
from onnxtrain.ir import functions, linear_models
from onnxtrain.ir.bodies import bodies_of, close_bodies, is_closed
from onnxtrain.ir.bounds import check_data, check_places, check_size, tensors_of
from onnxtrain.ir.expansions import can_expand, is_fused, write_out
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Signature, describe, free_name, notes_of, values
from onnxtrain.ir.merged import split_merged
from onnxtrain.ir.opsets import LOWEST, convert, raise_opset, version_of
from onnxtrain.ir.shape_rules.sizes import squeezed_axes
from onnxtrain.ir.shapes import operand
from onnxtrain.ir.stated_shapes import infer, name_dimensions
from onnxtrain.ir.verify import operator_problems, verify
from onnxtrain.ir.weights import FLOATING, Decision, Kind, decide, is_meant

Source: TypeAlias = Path | str | onnx.ModelProto | ir.Model

_DECISION = "onnxtrain.decision"  # key in Value.meta
_VALID = "give an .onnx file that onnx.checker accepts"
_FILE_FORMAT = 10  # at least: initializers of older ones are inputs, too


def read_forward(source: Source, parameters: Sequence[str] = ()) -> ForwardGraph:
    """The forward pass that a model holds, to be differentiated by its parameters.

    Args:
        source: the ``.onnx`` file, or the model itself, which is not changed. Data beside a file is found from there.
        parameters: names or patterns (``"encoder.*"``) of the floating constants to train: of initializers, those of
            bodies too, and of ``Constant`` nodes, by the name of their output. Where there is none, all initializers
            that ``weights.decide`` takes for weights.

    Raises:
        GraphError: the model cannot be read, its opset cannot be brought to one that graphs use, or it has no such
            constant; the message names the file.
    """
    with _named(source):
        model = _prepared(_load(source))
        return _forward(model, _to_inputs(model.graph, parameters))


def read_weights(
    source: Source, more: Sequence[str] = (), *, split: Sequence[str] | None = None
) -> tuple[ForwardGraph, dict[str, ir.TensorProtocol]]:
    """The forward pass that a model holds with all its weights as inputs, and what they contain.

    Weights are what ``weights.decide`` takes for such, statistics of BatchNormalization and doubtful ones that have
    dimensions; it finds its decision again by ``decision_of``. None of them is differentiated yet.

    Args:
        source: as for ``read_forward``.
        more: names of initializers and of outputs of ``Constant`` nodes that are weights as well.
        split: initializers that several modules read and that each gets for itself, besides those of ones or zeros
            that an exporter merged; None splits nothing, and only where it is not None are ``Constant`` nodes
            weights that ``more`` does not name.

    Raises:
        GraphError: as there.
    """
    with _named(source):
        model = _prepared(_load(source))
        hold_constants(model.graph, lambda v: v.name in more or (split is not None and _is_held(v)))
        if split is not None:
            split_merged(model.graph, split)
        held = [v for n, v in model.graph.initializers.items() if _is_held(v) or n in more]
        content = {str(v.name): v.const_value for v in held if v.const_value is not None}
        graph = _forward(model, tuple(_to_input(model.graph, v, model.graph) for v in held))
        return ForwardGraph(graph.model, dataclasses.replace(graph.signature, differentiable=())), content


def hold_constants(graph: ir.Graph, is_wanted: Callable[[ir.Value], bool]) -> None:
    """Turn floating Constant nodes into initializers of the same name, in place: weights may be either."""
    for node in [n for n in graph if n.op_type == "Constant" and n.domain == ""]:
        value = node.outputs[0]
        if not _is_floating(value) or value.is_graph_output() or not value.name:
            continue
        tensor = value.const_value = ir.convenience.get_const_tensor(value)
        if not is_wanted(value):
            value.const_value = None
            continue
        name, value.name = value.name, None
        made = ir.val(name, const_value=tensor)
        graph.register_initializer(made)
        value.replace_all_uses_with(made)
        graph.remove(node, safe=True)


def _is_held(value: ir.Value) -> bool:
    """Whether an initializer becomes an input: weights, statistics, and what may be a weight."""
    decision = decide(value)
    if decision is not None:
        value.meta[_DECISION] = decision
    return decision is not None and decision.kind is not Kind.CONSTANT and bool(decision.shape)


def decision_of(value: ir.Value) -> Decision | None:
    """What a constant that was read is, also once it is an input; None where that was not asked."""
    return notes_of(value).get(_DECISION)


def decisions(source: Source) -> list[Decision]:
    """What each floating constant of a model is, and why; those that an exporter merged are several.

    Raises:
        GraphError: the model cannot be read.
    """
    with _named(source):
        graph = _prepared(_load(source)).graph
        hold_constants(graph, lambda v: True)
        split_merged(graph)
        return [d for v in graph.initializers.values() if (d := decide(v)) is not None]


def restore_weights(model: ir.Model, weights: Mapping[str, ir.TensorProtocol]) -> None:
    """Turn inputs that are weights back into initializers, in place."""
    for value in [v for v in model.graph.inputs if v.name in weights]:
        value.const_value = weights[str(value.name)]
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)


def _forward(model: ir.Model, chosen: tuple[str, ...]) -> ForwardGraph:
    """A model, whose inputs ``chosen`` are weights, with closed bodies and all types and shapes."""
    graph = model.graph
    name_dimensions(graph, (body for inner in _graphs(graph) for node in inner for body in bodies_of(node)))
    close_bodies(graph)
    verify(model, operators=False)
    _write_out(graph)
    _state_axes(graph)
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
        raise GraphError(what, node=error.node, source=error.source, cure=error.cure or _VALID) from error
    except Exception as error:  # protobuf, numpy, onnx and onnx_ir raise many types for a file that is damaged
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause.__cause__, TypeError):  # onnx_ir's own mistakes
            cause = cause.__cause__
        what = f"{name} cannot be read: {first_line(cause)}"
        raise GraphError(what, cure=_VALID) from error


def load(source: Source) -> ir.Model:
    """The model itself with all its data; what is made of it does not change what was given.

    Raises:
        GraphError: the model cannot be read; the message names the file.
    """
    with _named(source):
        model = _load(source)
        _check_tensors(model.graph)
        return ir.external_data.load_to_model(model)


def _load(source: Source) -> ir.Model:
    """The model as it is, once it is known to be within bounds."""
    file = None
    if isinstance(source, ir.Model):
        model = source.clone()
    elif isinstance(source, onnx.ModelProto):
        model = _from_proto(source)
    elif isinstance(source, str | os.PathLike):
        check_file(source, GraphError, "give the path of an .onnx file")
        model, file = _from_proto(onnx.load(source, load_external_data=False)), Path(source)
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            ir.external_data.set_base_dir(graph, file.parent)
    else:
        cure = "pass a path, an onnx.ModelProto or an onnx_ir.Model"
        raise GraphError(f"the model is {type(source).__name__}, which is no model", cure=cure)
    check_data(model, file)
    check_size(model)
    return model


def _from_proto(proto: onnx.ModelProto) -> ir.Model:
    """The model, where it has nothing that onnx_ir leaves out or does not know."""
    if not proto.graph.output:
        raise GraphError("there is no model in it: the graph has no outputs", cure=_VALID)
    check_places(proto)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        kind = value.type.sequence_type.elem_type if value.type.HasField("sequence_type") else value.type
        if kind.HasField("map_type"):
            what = f"{value.name} is a map or a sequence of maps, as ZipMap gives them"
            raise GraphError(what, cure="export it with tensors alone: options={'zipmap': False} of skl2onnx")
    if proto.graph.sparse_initializer:
        name = proto.graph.sparse_initializer[0].values.name
        raise GraphError(f"the initializer {name} is sparse, which is not available", cure="store it as it is, dense")
    return ir.from_proto(proto)


def _prepared(model: ir.Model) -> ir.Model:
    """The model without functions, in the form of the opset that rules speak; every node a valid call."""
    _inline_functions(model)
    if version_of(model.graph) < LOWEST:
        model = convert(model)
    raise_opset(model.graph)
    model.ir_version = max(model.ir_version, _FILE_FORMAT)
    for node in model.graph.all_nodes():
        for problem in (*_unknown_operators(node), *operator_problems(node, model.graph.opset_imports)):
            raise GraphError(problem, node=describe(node), cure=_VALID)
    _check_tensors(model.graph)
    linear_models.lift(model.graph)
    return model


def _unknown_operators(node: ir.Node) -> Iterator[str]:
    """Whether a node is of the domain of ONNX and no operator of it."""
    assert node.graph is not None
    version = version_of(node.graph)  # type: ignore[arg-type]
    if node.domain == "" and not onnx.defs.has(node.op_type, version) and not can_expand(node):
        yield f"there is no operator {node.op_type} in opset {version} of ONNX"


def _check_tensors(graph: ir.Graph) -> None:
    """Read all tensors once: that fails where there is less data than the shape says."""
    for tensor in tensors_of(graph):
        try:
            _check_form(tensor)
            tensor.numpy()
        except GraphError:
            raise
        except Exception as error:  # numpy and onnx_ir raise many types
            what = f"the tensor {tensor.name} cannot be read as {tensor.dtype} {list(tensor.shape)}"
            cure = "give an .onnx file whose tensors have the data that their shapes say"
            raise GraphError(f"{what}: {first_line(error)}", cure=cure) from error


def _check_form(tensor: ir.TensorProtocol) -> None:
    """Refuse a shape that is none, or that memory would be made for without any data."""
    sizes = [int(d) for d in tensor.shape]  # type: ignore[arg-type]
    if any(size < 0 for size in sizes):
        raise GraphError(f"the tensor {tensor.name} has the shape {sizes}", cure="give sizes that are not negative")
    proto, dtype = getattr(tensor, "raw", None), tensor.dtype
    bits = dtype.itemsize * 8 if dtype != ir.DataType.STRING else 8
    fields = proto.ListFields() if isinstance(proto, onnx.TensorProto) else None
    has_data = fields is None or any(field.name.endswith("_data") for field, _ in fields)
    if math.prod(sizes) and (not has_data or math.prod(sizes) * bits > 8 * memory()):
        what = f"the tensor {tensor.name} of the shape {sizes} has no data, or more than this machine has memory"
        raise GraphError(what, cure="give a model whose tensors are whole")


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
        _infer(node)
        if is_closed(node):
            for body in bodies_of(node):
                _write_out(body)
            _infer(node)


def _state_axes(graph: ir.Graph) -> None:
    """Give each Squeeze the axes that it is taken to drop: its result has one rank, whatever the sizes of a batch are.

    One that drops nothing is no Squeeze any more: for onnxruntime no axes are all axes of size 1.
    """
    taken: set[str] = set()
    for inner in list(_graphs(graph)):
        for node in [n for n in inner if n.op_type == "Squeeze" and n.domain == "" and operand(n, 1) is None]:
            if (axes := squeezed_axes(node)) is None:
                continue
            node.resize_inputs(2 if axes else 1)
            if not axes:
                node.op_type = "Identity"
                continue
            taken = taken or {str(v.name) for g in _graphs(graph) for v in values(g)}
            stated = ir.val(
                free_name(f"{node.outputs[0].name}_axes", taken), const_value=ir.tensor(axes, ir.DataType.INT64)
            )
            taken.add(str(stated.name))
            inner.register_initializer(stated)
            node.replace_input_with(1, stated)


def _infer(node: ir.Node) -> None:
    """Infer the shapes of a node; whatever goes wrong names it."""
    try:
        infer(node)
    except OnnxTrainError:
        raise
    except Exception as error:  # a rule meets constants that no runtime would take
        what = f"{node.op_type} has operands that it cannot take: {first_line(error)}"
        raise GraphError(what, node=describe(node), cure=_VALID) from error


def _to_inputs(graph: ir.Graph, patterns: Sequence[str]) -> tuple[str, ...]:
    """Turn the constants to train into inputs of the outermost graph; says their names."""
    initializers = [(v, g) for g in _graphs(graph) for v in g.initializers.values()]
    constants = [
        (n.outputs[0], g) for g in _graphs(graph) for n in g if n.op_type == "Constant" and n.domain == "" and n.outputs
    ]
    if patterns:
        chosen = _matching([*initializers, *constants], patterns)
    else:
        chosen = [(v, g) for v, g in initializers if _kind(v) is Kind.WEIGHT]
    return tuple(_to_input(graph, value, holder) for value, holder in chosen)


def _kind(value: ir.Value) -> Kind | None:
    decision = decide(value)
    return None if decision is None else decision.kind


def _matching(known: list[tuple[ir.Value, ir.Graph]], patterns: Sequence[str]) -> list[tuple[ir.Value, ir.Graph]]:
    """The constants that are floating and match a pattern."""
    floating = [pair for pair in known if _is_floating(pair[0])]
    names = {value.name for value, _ in known}
    found = {p: [pair for pair in floating if is_meant(str(pair[0].name), p, names)] for p in patterns}
    if missing := [p for p, pairs in found.items() if not pairs]:
        other = any(is_meant(str(value.name), missing[0], names) for value, _ in known)
        what = f"{missing[0]} is not floating" if other else f"no initializer is called {missing[0]}"
        raise GraphError(what, cure="name floating initializers of the model")
    return list(dict.fromkeys(pair for pairs in found.values() for pair in pairs))


def _is_floating(value: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.dtype in FLOATING


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
        # two bodies may call different weights the same
        value.name = free_name(str(value.name), {v.name for v in (*graph.inputs, *graph.initializers.values())})
        graph.inputs.append(value)
    return str(value.name)
