"""Our operators in ONNX's own: written out in a node's place, or as functions of a model that any runtime can run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import functions, shapes
from onnxtrain.ir.bodies import open_bodies, replace
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.expansions import expand_nodes, graphs_of
from onnxtrain.ir.function_bodies import body_of, resolve
from onnxtrain.ir.graphs import DOMAIN, is_backward
from onnxtrain.ir.opsets import version_of
from onnxtrain.ir.recurrent import RECURRENT

Form = Callable[[Builder, ir.Node], list[ir.Value | None]]
FORMS: dict[str, Form] = {}


def known_form(op_type: str) -> Callable[[Form], Form]:
    """Register what an operator of ours is written as for other runtimes, by what is known of the node.

    It gives a value for each output, None for one that nothing reads.
    """

    def register(form: Form) -> Form:
        FORMS[op_type] = form
        return form

    return register


def attach(model: ir.Model) -> ir.Model:
    """A copy of the model that other runtimes can run: control flow is ONNX's, and our operators have their bodies.

    Nodes of ours get all the inputs, outputs and attributes that their body has: runtimes do not accept fewer.
    """
    functions.load()  # fills FORMS, too
    model = expand_nodes(model.clone(), _has_kernel)
    for graph in list(graphs_of(model.graph)):
        for node in [n for n in graph if n.domain == DOMAIN and n.op_type in FORMS]:
            _write_form(graph, node)
    open_bodies(model.graph)
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and node.op_type not in functions.OPAQUE:
            _complete(node)
    wanted: dict[str, None] = {}
    for op_type in sorted({n.op_type for n in model.graph.all_nodes() if n.domain == DOMAIN}):
        _collect(op_type, wanted)
    for op_type in wanted:
        model.functions[(DOMAIN, op_type, "")] = _of_opset(body_of(op_type), version_of(model.graph))
    if wanted:
        model.graph.opset_imports[DOMAIN] = functions.VERSION
    return model


def _write_form(graph: ir.Graph, node: ir.Node) -> None:
    op = Builder(graph, before=node, backward=is_backward(node))
    op.metadata = dict(node.metadata_props)
    replace(graph, node, FORMS[node.op_type](op, node))


def _of_opset(body: ir.Function, version: int) -> ir.Function:
    """A body for a model of that opset: runtimes want one opset in all parts of a model.

    Since opset 20 the operators of bodies have learned nothing but element types.
    """
    made = body.clone()
    made.opset_imports[""] = version
    return made


def _collect(op_type: str, wanted: dict[str, None]) -> None:
    """Add an operator of ours after those that its body uses: ONNX's evaluator reads functions in order."""
    if op_type in functions.OPAQUE or op_type in wanted:
        return
    for inner in sorted({n.op_type for n in body_of(op_type).all_nodes() if n.domain == DOMAIN}):
        _collect(inner, wanted)
    wanted[op_type] = None


def _has_kernel(node: ir.Node) -> bool:
    """Whether onnxruntime runs a node that could be written out: recurrent ones whose batch does not come first."""
    return node.op_type in RECURRENT and not shapes.attribute(node, "layout", 0)


def _complete(node: ir.Node) -> None:
    body = body_of(node.op_type)
    _fill(node)
    for name, default in body.attributes.items():
        if name not in node.attributes and default.value is not None:
            node.attributes[name] = default
    count = len(body.outputs)
    if len(node.outputs) < count:
        node.resize_outputs(count)
    for index, value in enumerate(node.outputs):
        if not value.name:
            value.name = f"{node.outputs[0].name}__{index}"


def _fill(node: ir.Node) -> None:
    """Give a node 0 for each input that it leaves out, so that the body of the operator finds a number."""
    definition, names = functions.DEFINITIONS.get(node.op_type), [v.name for v in body_of(node.op_type).inputs]
    optional = () if definition is None else definition.optional
    missing = [i for i, name in enumerate(names) if name in optional and shapes.operand(node, i) is None]
    if not missing:
        return
    zero = Builder(node.graph, before=node).node("Constant", [], {"value_float": 0.0})  # type: ignore[arg-type]
    zero.outputs[0].name = f"{node.outputs[0].name}__zero"
    node.resize_inputs(len(names))
    for index in missing:
        node.replace_input_with(index, zero.outputs[0])


def write_out(node: ir.Node) -> None:
    """Put the nodes of the body of one of our operators in the node's place."""
    assert node.graph is not None
    _fill(node)
    op = Builder(node.graph, before=node, backward=is_backward(node))  # type: ignore[arg-type]
    body = body_of(node.op_type)
    op.metadata = dict(node.metadata_props)
    known: dict[ir.Value | None, ir.Value | None] = dict(zip(body.inputs, node.inputs, strict=False))
    for inner in body:
        attributes = [a for a in (resolve(a, node, body) for a in inner.attributes.values()) if a is not None]
        tensor = ir.convenience.get_const_tensor(inner.outputs[0])
        if tensor is not None:
            known[inner.outputs[0]] = op.constant(tensor.numpy())
            continue
        if inner.op_type == "Constant" and all(map(_only_casts, inner.outputs[0].uses())):
            (attribute,) = attributes  # a number that the node states, of 64 bits as it is there
            known[inner.outputs[0]] = op.constant(np.asarray(attribute.value))
            continue
        given = [known.get(v) for v in inner.inputs]
        made = op.node(
            inner.op_type,
            given,
            {a.name: a for a in attributes},
            domain=inner.domain,
            outputs=len(inner.outputs),
        )
        known.update(zip(inner.outputs, made.outputs, strict=True))
    results = [known[v] for v in body.outputs][: len(node.outputs)]
    for old, new in zip(node.outputs, results, strict=True):
        assert new is not None
        new.type, new.shape = old.type or new.type, old.shape or new.shape
    replace(node.graph, node, [v for v in results if v is not None])  # type: ignore[arg-type]


def _only_casts(use: ir.Usage) -> bool:
    """Whether a value is read here to be given another element type."""
    return use.node.op_type == "CastLike" and use.idx == 0


def write_out_nodes(model: ir.Model, chosen: Callable[[ir.Node], bool]) -> ir.Model:
    """A copy of the model with the bodies of chosen operators of ours in their place; itself where there are none."""
    if not any(functions.has_body(n) and chosen(n) for g in graphs_of(model.graph) for n in g):
        return model
    model = model.clone()
    while found := [n for g in graphs_of(model.graph) for n in g if functions.has_body(n) and chosen(n)]:
        for node in found:
            write_out(node)
    return model
