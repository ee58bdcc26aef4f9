"""verify(model): find a malformed graph where it was made, not where it fails."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir import functions
from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.graphs import DOMAIN, describe, source_of

_CURE = "give a model that onnx.checker accepts; where it does, report it"
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


def verify(model: ir.Model, *, after: str = "", operators: bool = True) -> None:
    """Check order, names, operators, arities and element types of a model.

    Args:
        model: the model to check.
        after: what ran last, for the message.
        operators: check operators and types as well; else only that all values are defined, once and before their use.

    Raises:
        GraphError: something is wrong; the message names the node, its source line and ``after``.
    """
    _verify(model.graph, model.graph.opset_imports, after, operators)


def _verify(graph: ir.Graph, opsets: Mapping[str, int], after: str, operators: bool) -> None:
    defined: dict[str, ir.Value] = {}
    for value in (*graph.inputs, *graph.initializers.values()):
        if defined.setdefault(str(value.name), value) is not value:
            raise GraphError(f"two inputs or initializers are called {value.name}{_suffix(after)}", cure=_CURE)
    for node in graph:
        for problem in (*_name_problems(node, defined), *(_problems(node, opsets) if operators else ())):
            raise GraphError(problem + _suffix(after), node=describe(node), source=source_of(node), cure=_CURE)
        for body in bodies_of(node):
            _verify(body, opsets, after, operators)
        for value in node.outputs:
            if value.name:
                defined[value.name] = value
    for value in graph.outputs:
        if defined.get(str(value.name)) is not value:
            raise GraphError(f"the graph output {value.name} is produced by no node{_suffix(after)}", cure=_CURE)


def invalid(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that are no valid calls of their operators, whatever their place: ``verify`` would name the first."""
    return [n for n in graph if any(_problems_of_call(n, graph.opset_imports)) or any(_type_problems(n))]


def _suffix(after: str) -> str:
    return f" (after {after})" if after else ""


def _name_problems(node: ir.Node, defined: dict[str, ir.Value]) -> Iterator[str]:
    for value in node.inputs:
        if value is not None and defined.get(str(value.name)) is not value:
            yield f"the input {value.name} is not defined before its use"
    for value in node.outputs:
        if value.name and value.name in defined:
            yield f"two values are called {value.name}"


def _problems(node: ir.Node, opsets: Mapping[str, int]) -> Iterator[str]:
    for value in node.outputs:
        if value.name and value.type is None and value.uses():
            yield f"the output {value.name} has no type"
    yield from _problems_of_call(node, opsets)
    yield from _type_problems(node)


def _type_problems(node: ir.Node) -> Iterator[str]:
    if node.op_type in _SAME_TYPE:
        types = {v.dtype for v in node.inputs if v is not None and v.dtype is not None}
        if len(types) > 1:
            yield f"the operands have different types: {', '.join(sorted(str(t) for t in types))}"


def _problems_of_call(node: ir.Node, opsets: Mapping[str, int]) -> Iterator[str]:
    if node.domain == DOMAIN:
        if not functions.defines(node.op_type):
            yield f"there is no operator {node.op_type} in the domain {node.domain}"
        return
    version = opsets.get(node.domain)
    if version is None:
        yield f"the domain {node.domain!r} has no opset version"
    elif node.domain in _known_domains() and not _has(node.op_type, version, node.domain):
        yield f"there is no operator {node.op_type} in opset {version} of the domain {node.domain!r}"
    yield from operator_problems(node, opsets)


@functools.cache
def _known_domains() -> frozenset[str]:
    """The domains whose operators ONNX knows; those of others come from libraries that a session loads."""
    return frozenset(schema.domain for schema in onnx.defs.get_all_schemas())


def operator_problems(node: ir.Node, opsets: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with a call of an operator that ONNX knows: number of inputs, attributes and their types."""
    version = opsets.get(node.domain)
    if version is None or not _has(node.op_type, version, node.domain):
        return
    least, most, attributes, required = _form(node.op_type, version, node.domain)
    if not least <= len(node.inputs) <= most:
        yield f"it has {len(node.inputs)} inputs; {least} to {most} are allowed"
    if unknown := set(node.attributes) - set(attributes):
        yield f"it has no attribute {sorted(unknown)[0]}"
    if missing := required - set(node.attributes):
        yield f"its attribute {sorted(missing)[0]} is missing"
    for name, found in node.attributes.items():
        if name in attributes and (found.is_ref() or found.type.name != attributes[name]):
            yield f"its attribute {name} is no {attributes[name]}"


@functools.cache
def _has(op_type: str, version: int, domain: str) -> bool:
    return onnx.defs.has(op_type, version, domain)


@functools.cache
def _form(op_type: str, version: int, domain: str) -> tuple[int, int, dict[str, str], frozenset[str]]:
    """Fewest and most inputs of an operator, its attributes with their types, and those that must be there."""
    schema = onnx.defs.get_schema(op_type, version, domain)
    types = {name: a.type.name for name, a in schema.attributes.items()}
    return schema.min_input, schema.max_input, types, frozenset(n for n, a in schema.attributes.items() if a.required)
