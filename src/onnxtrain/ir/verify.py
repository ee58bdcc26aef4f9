"""verify(model): find a malformed graph where it was made, not where it fails."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir import functions
from onnxtrain.ir.graphs import describe, source_of

_SAME_TYPE = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "MatMul",
        "Gemm",
        "Max",
        "Min",
        "Sum",
        "Mean",
        "Equal",
        "Less",
        "Greater",
        "LessOrEqual",
        "GreaterOrEqual",
    ]
)


def verify(model: ir.Model, *, after: str = "") -> None:
    """Check order, names, operators, arities and element types of a model.

    Args:
        model: the model to check.
        after: what ran last, for the message.

    Raises:
        GraphError: something is wrong; the message names the node, its source line and ``after``.
    """
    graph = model.graph
    defined: dict[str, ir.Value] = {}
    for value in (*graph.inputs, *graph.initializers.values()):
        if defined.setdefault(str(value.name), value) is not value:
            raise GraphError(f"two inputs or initializers are called {value.name}{_suffix(after)}")
    for node in graph:
        for problem in _problems(node, defined, graph):
            raise GraphError(problem + _suffix(after), node=describe(node), source=source_of(node))
        for value in node.outputs:
            if value.name:
                defined[value.name] = value
    for value in graph.outputs:
        if defined.get(str(value.name)) is not value:
            raise GraphError(f"the graph output {value.name} is produced by no node{_suffix(after)}")


def invalid(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that are no valid calls of their operators, whatever their place: ``verify`` would name the first."""
    return [n for n in graph if any(_operator_problems(n, graph)) or any(_type_problems(n))]


def _suffix(after: str) -> str:
    return f" (after {after})" if after else ""


def _problems(node: ir.Node, defined: dict[str, ir.Value], graph: ir.Graph) -> Iterator[str]:
    for value in node.inputs:
        if value is not None and defined.get(str(value.name)) is not value:
            yield f"the input {value.name} is not defined before its use"
    for value in node.outputs:
        if value.name and value.name in defined:
            yield f"two values are called {value.name}"
        if value.name and value.type is None and value.uses():
            yield f"the output {value.name} has no type"
    yield from _operator_problems(node, graph)
    yield from _type_problems(node)


def _type_problems(node: ir.Node) -> Iterator[str]:
    if node.op_type in _SAME_TYPE:
        types = {v.dtype for v in node.inputs if v is not None and v.dtype is not None}
        if len(types) > 1:
            yield f"the operands have different types: {', '.join(sorted(str(t) for t in types))}"


def _operator_problems(node: ir.Node, graph: ir.Graph) -> Iterator[str]:
    if node.domain == functions.DOMAIN:
        if not functions.defines(node.op_type):
            yield f"there is no operator {node.op_type} in the domain {node.domain}"
        return
    version = graph.opset_imports.get(node.domain)
    if version is None:
        yield f"the domain {node.domain!r} has no opset version"
        return
    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        yield f"there is no operator {node.op_type} in opset {version} of the domain {node.domain!r}"
        return
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        yield f"it has {len(node.inputs)} inputs; {schema.min_input} to {schema.max_input} are allowed"
    if unknown := set(node.attributes) - set(schema.attributes):
        yield f"it has no attribute {sorted(unknown)[0]}"
