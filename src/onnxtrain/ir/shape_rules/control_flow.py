"""Control flow with closed bodies: a body is inferred with what is known of the node's operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Dim, Dims, Facts, attribute, dims_of, fresh_dim, shape_rule


@shape_rule("If", domain=DOMAIN)
def if_(node: ir.Node) -> Sequence[Facts]:
    """Dimensions in which both branches agree; those that only one knows are new symbols."""
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for body in branches:
        for formal, actual in zip(body.inputs, node.inputs[1:], strict=True):
            _enter(formal, actual, constant=True)
        shapes.infer_graph(body)
    pairs = zip(node.outputs, *(b.outputs for b in branches), strict=True)
    known = _symbols(node.inputs)
    return [Facts(a.dtype or ir.DataType.UNDEFINED, _merged(own, a, b, known)) for own, a, b in pairs]


@shape_rule("Scan", domain=DOMAIN)
def scan(node: ir.Node) -> Sequence[Facts]:
    """States keep their shape; a scan output has one slice for each iteration."""
    body, states = node.attributes["body"].as_graph(), attribute(node, "states")
    count = attribute(node, "num_scan_inputs")
    axes = attribute(node, "scan_input_axes") or [0] * count
    length: Dim = 0
    for index, (formal, actual) in enumerate(zip(body.inputs, node.inputs, strict=True)):
        _enter(formal, actual, constant=index >= states + count)
        dims = dims_of(formal)
        if states <= index < states + count and dims is not None:
            axis = axes[index - states] % len(dims)
            length = dims[axis]
            formal.shape = ir.Shape(dims[:axis] + dims[axis + 1 :])
    shapes.infer_graph(body)
    made = [Facts(v.dtype or ir.DataType.UNDEFINED, dims_of(v)) for v in body.inputs[:states]]
    axes = attribute(node, "scan_output_axes") or [0] * (len(body.outputs) - states)
    return made + _stacked(node, body.outputs[states:], axes, length)


@shape_rule("Loop", domain=DOMAIN)
def loop(node: ir.Node) -> Sequence[Facts]:
    """A dimension of a state that an iteration changes is a new symbol; scan outputs have one slice for each one."""
    body, states = node.attributes["body"].as_graph(), attribute(node, "states")
    types = (ir.DataType.INT64, ir.DataType.BOOL)
    for formal, dtype in zip(body.inputs, types, strict=False):
        formal.type, formal.shape = ir.TensorType(dtype), ir.Shape(())
    for index, (formal, actual) in enumerate(zip(body.inputs[2:], node.inputs[2:], strict=True)):
        _enter(formal, actual, constant=index >= states)
    shapes.infer_graph(body)
    if any(_loosen(i, o) for i, o in zip(body.inputs[2:], body.outputs[1 : states + 1], strict=False)):
        for value in (v for n in body for v in n.outputs):
            value.shape = None
            shapes.forget_data(value)
        shapes.infer_graph(body)
    known = _symbols(node.inputs)
    made = [
        Facts(v.dtype or ir.DataType.UNDEFINED, _visible(own, dims_of(v), known))
        for own, v in zip(node.outputs, body.outputs[1 : states + 1], strict=False)
    ]
    length = fresh_dim(node.outputs[min(states, len(node.outputs) - 1)], 0)
    return made + _stacked(node, body.outputs[states + 1 :], [0] * len(body.outputs), length)


def _enter(formal: ir.Value, actual: ir.Value | None, constant: bool) -> None:
    """What is known of an operand is known of the body's input; its content only where it is the same each time."""
    if actual is None or actual.type is None:
        return
    formal.type, formal.shape = actual.type, actual.shape
    data = shapes.data_of(actual) if constant else None
    shapes.forget_data(formal)
    if data is not None:
        shapes.set_data(formal, data)


def _loosen(formal: ir.Value, result: ir.Value) -> bool:
    """Forget the dimensions of a state that differ after an iteration; says whether there are any."""
    before, after = dims_of(formal), dims_of(result)
    if before is None or before == after:
        return False
    if after is None or len(after) != len(before):
        formal.shape = None
    else:
        dims = [b if b == a else fresh_dim(formal, i) for i, (b, a) in enumerate(zip(before, after, strict=True))]
        formal.shape = ir.Shape(dims)
    return True


def _symbols(values: Iterable[ir.Value | None]) -> set[str]:
    """The symbols by which sizes are known outside of a body."""
    dims = [d for v in values if v is not None for d in (*(dims_of(v) or ()), *_parts(v))]
    return set().union(*(d.free_symbols() for d in dims if isinstance(d, ir.SymbolicDim)), set())


def _parts(value: ir.Value) -> Dims:
    data = shapes.data_of(value)
    return data if isinstance(data, tuple) else () if data is None else (data,)


def _merged(own: ir.Value, a: ir.Value, b: ir.Value, known: set[str]) -> Dims | None:
    first, second = dims_of(a), dims_of(b)
    if first is None or second is None or len(first) != len(second):
        return None
    first = tuple(x if x == y else ir.SymbolicDim(None) for x, y in zip(first, second, strict=True))
    return _visible(own, first, known)


def _visible(own: ir.Value, dims: Dims | None, known: set[str]) -> Dims | None:
    """Dimensions with symbols born inside of a body replaced by the output's own."""
    if dims is None:
        return None
    return tuple(
        d if isinstance(d, int) or (d.value is not None and d.free_symbols() <= known) else fresh_dim(own, i)
        for i, d in enumerate(dims)
    )


def _stacked(node: ir.Node, slices: Sequence[ir.Value], axes: Sequence[int], length: Dim) -> list[Facts]:
    known, made = _symbols(node.inputs), []
    for own, value, axis in zip(node.outputs[len(node.outputs) - len(slices) :], slices, axes, strict=False):
        dims = dims_of(value)
        if dims is not None:
            axis %= len(dims) + 1
            dims = _visible(own, (*dims[:axis], ir.SymbolicDim(None), *dims[axis:]), known)
            dims = None if dims is None else (*dims[:axis], length, *dims[axis + 1 :])
        made.append(Facts(value.dtype or ir.DataType.UNDEFINED, dims))
    return made
