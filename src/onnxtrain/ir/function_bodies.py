"""Bodies of our operators: converted on first use, and as graphs of their own for one node."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir

from onnxtrain.ir import functions, shapes
from onnxtrain.ir.graphs import DOMAIN, copy_notes


@functools.cache
def script_of(op_type: str) -> Any:
    """One of our operators as an ``onnxscript.OnnxFunction``, converted on first use."""
    import onnxscript

    functions.load()
    body, opset = functions.DEFINITIONS[op_type].body, onnxscript.values.Opset(DOMAIN, functions.VERSION)
    body.__globals__.update(op=onnxscript.opset20, own=opset)
    return onnxscript.script(opset, default_opset=onnxscript.opset20)(body)


@functools.cache
def body_of(op_type: str) -> ir.Function:
    """The ONNX function of one of our operators."""
    return ir.serde.deserialize_function(script_of(op_type).to_function_proto())


def instantiate(node: ir.Node) -> ir.Graph:
    """The body of a node of ours as a graph of its own: inputs typed as the node's, attributes filled in, inferred."""
    body = body_of(node.op_type)
    inputs = [_copy(v, name) for v, name in zip(node.inputs, [i.name for i in body.inputs], strict=False)]
    known: dict[ir.Value, ir.Value | None] = dict(zip(body.inputs, inputs, strict=False))
    opsets = {"": 20, DOMAIN: functions.VERSION}
    graph = ir.Graph([v for v in inputs if v is not None], [], nodes=[], opset_imports=opsets)
    for inner in body:
        copied = ir.Node(
            inner.domain,
            inner.op_type,
            [None if v is None else known.get(v) for v in inner.inputs],
            attributes=[a for a in (resolve(a, node, body) for a in inner.attributes.values()) if a is not None],
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
    copy_notes(value, copied)
    return copied


def resolve(attr: ir.Attr, node: ir.Node, body: ir.Function) -> ir.Attr | None:
    """An attribute of a node in a body, for one node that the body stands for; None where nothing states it."""
    name = attr.ref_attr_name
    if name is None:
        return attr
    found = node.attributes.get(name) or body.attributes.get(name)
    if found is None or found.value is None:
        return None
    return ir.Attr(attr.name, found.type, found.value)
