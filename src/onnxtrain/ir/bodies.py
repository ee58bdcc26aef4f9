"""Control flow with closed bodies: ``If``, ``Loop`` and ``Scan`` that read nothing but their own inputs.

ONNX lets a subgraph read values of the graph around it without saying so. Here every value that a body reads is an
operand of the node, after ONNX's own operands, and an input of the body, after ONNX's own inputs; constants are copied
into the body. So liveness, saved values and gradients see all that a node reads in ``node.inputs``, and a body can be
taken for a graph of its own. The closed forms are operators of ours under ONNX's names: ``Loop`` and ``Scan`` say with
``states`` how many values are carried from one iteration to the next.

``close_bodies`` comes after a model is made or read, ``open_bodies`` before a model is given to another runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN, copy_notes, free_name, keep_size, notes_of, values
from onnxtrain.ir.traits import Trait, traits_of

CLOSED = frozenset(("If", "Loop", "Scan"))
BODY = "body"  # attribute of an operator that is its body: run in the node's place by a runtime without a kernel
_COPY = "onnxtrain.copy"  # key in Value.meta of a constant of an outer graph


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs among a node's attributes, in the order of their names' appearance."""
    return [a.value for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def is_closed(node: ir.Node) -> bool:
    """Whether the node is control flow with closed bodies."""
    return node.domain == DOMAIN and node.op_type in CLOSED


def close_bodies(graph: ir.Graph) -> None:
    """Turn ONNX's control flow into ours, in place, nested bodies first."""
    for node in graph:
        for body in bodies_of(node):
            close_bodies(body)
        if node.domain == "" and node.op_type in CLOSED:
            _close(node)


def _close(node: ir.Node) -> None:
    bodies = bodies_of(node)
    captured = list(dict.fromkeys(v for body in bodies for v in _captured(body)))
    for body in bodies:
        known = {v: _inside(body, v) for v in captured}
        _replace(body, known)
        for index, value in enumerate(list(body.outputs)):
            if value in known:
                body.outputs[index] = known[value]
    first, given = len(node.inputs), [v for v in captured if not _is_constant(v)]
    if node.op_type == "Loop":
        first = max(first, 2)
        node.attributes["states"] = ir.AttrInt64("states", first - 2)
    if node.op_type == "Scan":
        count = node.attributes["num_scan_inputs"].as_int()
        node.attributes["states"] = ir.AttrInt64("states", first - count)
    node.resize_inputs(first + len(given))
    for index, value in enumerate(given, first):
        node.replace_input_with(index, value)
    node.domain = DOMAIN


def _captured(body: ir.Graph) -> Iterator[ir.Value]:
    """Values of outer graphs that a body reads or gives back."""
    own = {*body.inputs, *body.initializers.values(), *(v for n in body for v in n.outputs)}
    read = (v for n in body for v in n.inputs if v is not None)
    yield from (v for v in (*read, *body.outputs) if v not in own)


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return not value.is_graph_input() and (
        value.const_value is not None or (node is not None and node.op_type == "Constant" and node.domain == "")
    )


def _inside(body: ir.Graph, value: ir.Value) -> ir.Value:
    """An input of the body, or a constant of its own, that stands for an outer value."""
    made = ir.Value(name=str(value.name), type=value.type, shape=value.shape)
    copy_notes(value, made)
    if _is_constant(value):
        made.const_value = tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            made.type, made.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        made.meta[_COPY] = True
        body.register_initializer(made)
    else:
        body.inputs.append(made)
    return made


def read_outside(graph: ir.Graph, value: ir.Value) -> None:
    """Let closed bodies that have a copy of a constant read the value of that name, which is none any longer."""
    for node in graph:
        if not is_closed(node) or not any(_has_copy(body, str(value.name)) for body in bodies_of(node)):
            continue
        node.resize_inputs(len(node.inputs) + 1)
        node.replace_input_with(len(node.inputs) - 1, value)
        for body in bodies_of(node):
            formal = ir.Value(name=str(value.name), type=value.type, shape=value.shape)
            old = body.initializers.get(str(value.name))
            if old is not None and _COPY in notes_of(old):
                body.initializers.pop(str(value.name))
                old.replace_all_uses_with(formal, replace_graph_outputs=True)
            body.inputs.append(formal)
            read_outside(body, formal)


def _has_copy(body: ir.Graph, name: str) -> bool:
    inner = body.initializers.get(name)
    copied = inner is not None and _COPY in notes_of(inner)
    return copied or any(_has_copy(deeper, name) for node in body for deeper in bodies_of(node))


def _replace(body: ir.Graph, known: dict[ir.Value, ir.Value]) -> None:
    for node in body:
        for index, value in enumerate(node.inputs):
            if value is not None and value in known:
                node.replace_input_with(index, known[value])


def open_bodies(graph: ir.Graph) -> None:
    """Turn our control flow into ONNX's, and every node that carries its body into that body's nodes, in place.

    Values inside of bodies get names of their own: ONNX lets no name be used twice, and knows a value by its name.
    """
    _open(graph, _fresh_names(graph))


def _fresh_names(graph: ir.Graph, prefix: str = "") -> Callable[[ir.Value], None]:
    taken, count = {str(v.name) for v in values(graph)}, 0

    def rename(value: ir.Value) -> None:
        nonlocal count
        if value.name:
            value.name, count = free_name(f"{prefix}{value.name}__{count}", taken), count + 1
            taken.add(value.name)

    return rename


def _open(graph: ir.Graph, rename: Callable[[ir.Value], None]) -> None:
    for node in list(graph):
        if BODY in node.attributes and not is_closed(node) and node.domain == DOMAIN:
            inline(graph, node, rename)
    for node in list(graph):
        if not is_closed(node):
            continue
        count = min(len(body.inputs) for body in bodies_of(node))
        own = {"If": 0, "Loop": 2, "Scan": 0}[node.op_type]
        if node.op_type == "Loop":
            own += node.attributes.pop("states").as_int()
        if node.op_type == "Scan":
            own += node.attributes.pop("states").as_int() + node.attributes["num_scan_inputs"].as_int()
        outer = node.inputs[len(node.inputs) - (count - own) :] if count > own else ()
        for body in bodies_of(node):
            _reopen(body, own, outer, rename)
        node.resize_inputs(len(node.inputs) - len(outer))
        node.domain = ""


def _reopen(body: ir.Graph, own: int, outer: Sequence[ir.Value | None], rename: Callable[[ir.Value], None]) -> None:
    made = {v for n in body for v in n.outputs}
    for index, value in enumerate(list(body.outputs)):
        if value not in made:  # ONNX wants outputs of a body to be made in it, each once
            body.outputs[index] = _copied(body, value)
        made.discard(value)
    formals = list(body.inputs)[own:]
    del body.inputs[own:]
    body.name = body.name or "body"
    _rename_all(body, rename)
    _replace(body, {f: v for f, v in zip(formals, outer, strict=True) if v is not None})
    _open(body, rename)


def _copied(graph: ir.Graph, value: ir.Value, before: ir.Node | None = None) -> ir.Value:
    node = ir.Node("", "Identity", [value], num_outputs=1)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    node.outputs[0].name = f"{value.name}_given"
    if before is None:
        graph.append(node)
    else:
        graph.insert_before(before, node)
    return node.outputs[0]


def _rename_all(body: ir.Graph, rename: Callable[[ir.Value], None]) -> None:
    for value in (*body.inputs, *(v for n in body for v in n.outputs)):
        rename(value)
    for value in list(body.initializers.values()):
        body.initializers.pop(str(value.name))
        rename(value)
        body.register_initializer(value)


def inline(graph: ir.Graph, node: ir.Node, rename: Callable[[ir.Value], None] | None = None) -> None:
    """Put the nodes of the body that a node carries in its place; the body takes the inputs that are not missing."""
    rename = rename or _fresh_names(graph, f"{node.outputs[0].name}_")
    body = node.attributes[BODY].as_graph()
    _rename_all(body, rename)
    known = dict(zip(body.inputs, (v for v in node.inputs if v is not None), strict=True))
    _replace(body, known)
    for value in list(body.initializers.values()):
        body.initializers.pop(str(value.name))
        graph.register_initializer(value)
    results = [known.get(v, v) for v in body.outputs]
    body.outputs.clear()
    for index, inner in enumerate(list(body)):
        body.remove(inner)
        inner.name = f"{node.name}_{index}"
        graph.insert_before(node, inner)
    replace(graph, node, results)


def replace(graph: ir.Graph, node: ir.Node, results: Sequence[ir.Value | None]) -> None:
    """Take a node away and let all that read its outputs read other values; None stands for one that nothing reads."""
    for old, new in zip(node.outputs, results, strict=False):
        if new is not None:
            _become(graph, node, old, new)
    graph.remove(node, safe=True)


def rewrite(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr] = ()) -> None:
    """Turn a node into one of ONNX's operators that gives the same; its outputs stay as they are."""
    node.domain, node.op_type = "", op_type
    node.attributes.clear()
    node.attributes.update({a.name: a for a in attributes})
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _become(graph: ir.Graph, node: ir.Node, old: ir.Value, new: ir.Value) -> None:
    """Let all that read a value read another; a graph output keeps its name."""
    keep_size(old, new)
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        return
    copied, name = _copied(graph, new, node), old.name
    old.replace_all_uses_with(copied, replace_graph_outputs=True)
    old.name, copied.name = None, name


def remove_unread(graph: ir.Graph) -> bool:
    """Take away nodes and constants that nothing reads; says whether there were any."""
    modified = False
    for node in reversed(list(graph)):
        read = any(v.uses() or v.is_graph_output() for v in node.outputs)
        if not read and not Trait.STAYS & traits_of(node):
            graph.remove(node, safe=True)
            modified = True
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            graph.initializers.pop(name)
            modified = True
    return modified
