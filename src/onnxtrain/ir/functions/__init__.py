"""Our operators (domain ``onnxtrain``): each is an ONNX function whose body is standard operators.

A definition is an ordinary onnxscript function in one of this package's modules. It is converted when first
used, and onnxscript imported then, so that reading the table costs nothing: ``op``, the operators of ONNX, and
``own``, those of ours, are put where bodies find them. The body is the truth: a backend may lower the operator to one
kernel, and any ONNX runtime can run the body instead.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import CLOSED, open_bodies, replace
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.expansions import expand_nodes, graphs_of
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.opsets import version_of
from onnxtrain.ir.recurrent import RECURRENT

VERSION = 1
op: Any = None
own: Any = None
OPAQUE = {"ATen", "ATenGrad", "PythonOp", "PythonOpGrad"}  # only the torch backend can run them: no body exists


@dataclasses.dataclass(frozen=True)
class Definition:
    """One operator of ours.

    Args:
        body: the Python function that onnxscript converts.
        like: for each output, the index of the input whose type and shape it has; None asks the body.
        optional: names of inputs that a node may leave out; the body reads 0 in their place.
    """

    body: Callable[..., Any]
    like: tuple[int, ...] | None
    optional: frozenset[str] = frozenset()


_GRADIENTS = {f"{op_type}Grad" for op_type in RECURRENT}  # they carry their bodies
DEFINITIONS: dict[str, Definition] = {}
Form = Callable[[Builder, ir.Node], list[ir.Value | None]]
FORMS: dict[str, Form] = {}


def function(
    *, like: Sequence[int] | None = None, optional: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operator under the Python function's name; registering twice is an error."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        if body.__name__ in DEFINITIONS:
            raise ValueError(f"the operator {body.__name__} is defined twice")
        DEFINITIONS[body.__name__] = Definition(body, None if like is None else tuple(like), frozenset(optional))
        return body

    return register


def known_form(op_type: str) -> Callable[[Form], Form]:
    """Register what an operator of ours is written as for other runtimes, by what is known of the node.

    It gives a value for each output, None for one that nothing reads.
    """

    def register(form: Form) -> Form:
        FORMS[op_type] = form
        return form

    return register


@functools.cache
def load() -> None:
    """Fill ``DEFINITIONS``."""
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")


def defines(op_type: str) -> bool:
    """Whether the operator is one of ours."""
    load()
    return op_type in DEFINITIONS or op_type in OPAQUE or op_type in CLOSED or op_type in _GRADIENTS


@functools.cache
def script_of(op_type: str) -> Any:
    """One of our operators as an ``onnxscript.OnnxFunction``, converted on first use."""
    import onnxscript

    load()
    body, opset = DEFINITIONS[op_type].body, onnxscript.values.Opset(DOMAIN, VERSION)
    body.__globals__.update(op=onnxscript.opset20, own=opset)
    return onnxscript.script(opset, default_opset=onnxscript.opset20)(body)


@functools.cache
def body_of(op_type: str) -> ir.Function:
    """The ONNX function of one of our operators."""
    return ir.serde.deserialize_function(script_of(op_type).to_function_proto())


def attach(model: ir.Model) -> ir.Model:
    """A copy of the model that other runtimes can run: control flow is ONNX's, and our operators have their bodies.

    Nodes of ours get all the inputs, outputs and attributes that their body has: runtimes do not accept fewer.
    """
    model = expand_nodes(model.clone(), _has_kernel)
    for graph in list(graphs_of(model.graph)):
        for node in [n for n in graph if n.domain == DOMAIN and n.op_type in FORMS]:
            _write_form(graph, node)
    open_bodies(model.graph)
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and node.op_type not in OPAQUE:
            _complete(node)
    wanted: dict[str, None] = {}
    for op_type in sorted({n.op_type for n in model.graph.all_nodes() if n.domain == DOMAIN}):
        _collect(op_type, wanted)
    for op_type in wanted:
        model.functions[(DOMAIN, op_type, "")] = _of_opset(body_of(op_type), version_of(model.graph))
    if wanted:
        model.graph.opset_imports[DOMAIN] = VERSION
    return model


def _write_form(graph: ir.Graph, node: ir.Node) -> None:
    op = Builder(graph, before=node)
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
    if op_type in OPAQUE or op_type in wanted:
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
    definition, names = DEFINITIONS.get(node.op_type), [v.name for v in body_of(node.op_type).inputs]
    optional = () if definition is None else definition.optional
    missing = [i for i, name in enumerate(names) if name in optional and shapes.operand(node, i) is None]
    if not missing:
        return
    zero = Builder(node.graph, before=node).node("Constant", [], {"value_float": 0.0})  # type: ignore[arg-type]
    zero.outputs[0].name = f"{node.outputs[0].name}__zero"
    node.resize_inputs(len(names))
    for index in missing:
        node.replace_input_with(index, zero.outputs[0])


def has_body(node: ir.Node) -> bool:
    """Whether a node is one of our operators that is a function of standard operators."""
    load()
    return node.domain == DOMAIN and node.op_type in DEFINITIONS


def write_out(node: ir.Node) -> None:
    """Put the nodes of the body of one of our operators in the node's place."""
    assert node.graph is not None
    _fill(node)
    op, body = Builder(node.graph, before=node), body_of(node.op_type)  # type: ignore[arg-type]
    op.metadata = dict(node.metadata_props)
    known: dict[ir.Value | None, ir.Value | None] = dict(zip(body.inputs, node.inputs, strict=False))
    for inner in body:
        attributes = [a for a in (_resolve(a, node, body) for a in inner.attributes.values()) if a is not None]
        tensor = ir.convenience.get_const_tensor(inner.outputs[0])
        if tensor is not None:
            known[inner.outputs[0]] = op.constant(tensor.numpy())
            continue
        if inner.op_type == "Constant" and all(_only_casts(use) for use in inner.outputs[0].uses()):
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
    if not any(has_body(n) and chosen(n) for g in graphs_of(model.graph) for n in g):
        return model
    model = model.clone()
    while found := [n for g in graphs_of(model.graph) for n in g if has_body(n) and chosen(n)]:
        for node in found:
            write_out(node)
    return model


def infer_by_body(node: ir.Node) -> list[shapes.Facts]:
    """Facts of the outputs of one of our operators: from its ``like``, else from its body run symbolically."""
    load()
    definition = DEFINITIONS.get(node.op_type)
    if definition is None:
        return [shapes.Facts(v.dtype or ir.DataType.UNDEFINED, shapes.dims_of(v)) for v in node.outputs]
    if definition.like is not None:
        models = [node.inputs[i] for i in definition.like]
        return [shapes.Facts(shapes.dtype_of(m), shapes.dims_of(m)) for m in models if m is not None]
    graph = instantiate(node)
    return [_facts(value, own) for value, own in zip(graph.outputs, node.outputs, strict=False)]


def _facts(value: ir.Value, own: ir.Value) -> shapes.Facts:
    dims = shapes.dims_of(value)
    if dims is not None:  # symbols born inside the body must not be shared between instances
        dims = tuple(
            d if isinstance(d, int) or not _internal(d) else shapes.fresh_dim(own, i) for i, d in enumerate(dims)
        )
    data = shapes.data_of(value)
    return shapes.Facts(value.dtype or ir.DataType.UNDEFINED, dims, None if _mentions_internal(data) else data)


def _internal(dim: ir.SymbolicDim) -> bool:
    return dim.value is None or any(s.startswith("_body_") for s in dim.free_symbols())


def _mentions_internal(data: shapes.Data | None) -> bool:
    parts: Iterable[shapes.Dim] = data if isinstance(data, tuple) else () if data is None else (data,)
    return any(_internal(d) for d in parts if not isinstance(d, int))


def instantiate(node: ir.Node) -> ir.Graph:
    """The body of a node of ours as a graph of its own: inputs typed as the node's, attributes filled in, inferred."""
    body = body_of(node.op_type)
    inputs = [_copy(v, name) for v, name in zip(node.inputs, [i.name for i in body.inputs], strict=False)]
    known: dict[ir.Value, ir.Value | None] = dict(zip(body.inputs, inputs, strict=False))
    graph = ir.Graph([v for v in inputs if v is not None], [], nodes=[], opset_imports={"": 20, DOMAIN: VERSION})
    for inner in body:
        copied = ir.Node(
            inner.domain,
            inner.op_type,
            [None if v is None else known.get(v) for v in inner.inputs],
            attributes=[a for a in (_resolve(a, node, body) for a in inner.attributes.values()) if a is not None],
            outputs=[ir.val(f"_body_{v.name}") for v in inner.outputs],
        )
        graph.append(copied)
        known.update(zip(inner.outputs, copied.outputs, strict=True))
        shapes.infer(copied)
    graph.outputs.extend(v for v in (known[o] for o in body.outputs) if v is not None)
    return graph


def _copy(value: ir.Value | None, name: str | None) -> ir.Value | None:
    if value is None:
        return None
    copied = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
    copied.meta.update(value.meta)
    return copied


def _resolve(attr: ir.Attr, node: ir.Node, body: ir.Function) -> ir.Attr | None:
    if not attr.is_ref():
        return attr
    found = node.attributes.get(attr.ref_attr_name) or body.attributes.get(attr.ref_attr_name)
    if found is None or found.value is None:
        return None
    return ir.Attr(attr.name, found.type, found.value)
