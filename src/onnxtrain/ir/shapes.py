"""Type and shape of a node's outputs, symbolic dimensions and the content of shape tensors included.

A dimension is an ``int`` or an ``onnx_ir.SymbolicDim``. Small integer tensors (rank 0 and 1) carry their content as
*data*: ``Concat(Shape(x)[:1], [64])`` is known to be ``(batch, 64)``, so ``Expand`` and ``Reshape`` keep their
dimensions. A rule of ``shape_rules`` states the facts of one operator, or of all others of a domain; what has no rule
is asked of ONNX's own inference, node by node. What is still unknown gets a symbol of its own, named after the value.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import onnx
import onnx_ir as ir
import sympy

from onnxtrain.errors import ShapeError
from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.graphs import describe, notes_of, source_of

Dim: TypeAlias = int | ir.SymbolicDim
Dims: TypeAlias = tuple[Dim, ...]
Data: TypeAlias = Dim | Dims

_DATA = "onnxtrain.data"
_LARGEST_DATA = 64
_LONGEST_EXPRESSION = 2000  # characters: each node may double it


class Facts(NamedTuple):
    """What is known of one output: element type, dimensions (None: rank unknown), content of a small integer tensor."""

    dtype: ir.DataType
    dims: Dims | None
    data: Data | None = None


ShapeRule: TypeAlias = Callable[[ir.Node], Sequence[Facts]]
RULES: dict[tuple[str, str], ShapeRule] = {}
OTHERS = "*"  # in the place of an operator, or of a domain: those that have no rule of their own


def shape_rule(*op_types: str, domain: str = "") -> Callable[[ShapeRule], ShapeRule]:
    """Register the shape rule of one or more operators, or of a domain's ``OTHERS``; registering twice is an error."""

    def register(rule: ShapeRule) -> ShapeRule:
        for op_type in op_types:
            if (domain, op_type) in RULES:
                raise ValueError(f"the shape rule of {op_type} is registered twice")
            RULES[domain, op_type] = rule
        return rule

    return register


def dims_of(value: ir.Value) -> Dims | None:
    """The dimensions of a value, or None where its rank is not known."""
    return None if value.shape is None else tuple(value.shape)


def known_dims(value: ir.Value) -> Dims:
    """The dimensions of a value.

    Raises:
        ShapeError: its rank is not known.
    """
    if value.shape is None:
        raise _unknown("rank", value)
    return tuple(value.shape)


def rank(value: ir.Value) -> int:
    """The number of dimensions of a value (ShapeError where it is not known)."""
    return len(known_dims(value))


def dtype_of(value: ir.Value) -> ir.DataType:
    """The element type of a value (ShapeError where it is not known)."""
    if value.dtype is None:
        raise _unknown("element type", value)
    return value.dtype


def _unknown(what: str, value: ir.Value) -> ShapeError:
    node = value.producer()
    if (stranger := _stranger(value)) is not None:
        return ShapeError(
            f"the {what} of {value.name} is not known: {stranger.op_type} of the domain {stranger.domain!r} is no "
            "operator that ONNX or onnxtrain knows",
            node=describe(stranger),
            source=source_of(stranger),
            cure="state type and shape of its outputs in the model's value_info, or export it without that operator",
        )
    return ShapeError(
        f"the {what} of {value.name} is not known",
        node=describe(node) if node else "",
        source=source_of(node) if node else "",
        cure="state its type and shape in the model's value_info",
    )


def _stranger(value: ir.Value) -> ir.Node | None:
    """The node of an unknown operator that keeps the shape of a value from being known."""
    todo, seen = [value], set()
    while todo:
        node = todo.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        version = node.graph.opset_imports.get(node.domain, 20) if node.graph is not None else 20  # bodies say none
        if (node.domain, node.op_type) not in RULES and not onnx.defs.has(node.op_type, version, node.domain):
            return node
        todo.extend(v for v in node.inputs if v is not None and (v.shape is None or v.dtype is None))
    return None


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The content of a constant value as an array, or None where the value is not constant."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def data_of(value: ir.Value | None) -> Data | None:
    """The symbolic content of a small integer tensor, or None where it is not known."""
    if value is None:
        return None
    if _DATA not in (found := notes_of(value)):
        array = constant_of(value)
        if array is None or array.ndim > 1 or array.size > _LARGEST_DATA or array.dtype.kind not in "iu":
            return None
        found = value.meta
        found[_DATA] = tuple(array.tolist()) if array.ndim else int(array)
    return found[_DATA]


def set_data(value: ir.Value, data: Data) -> None:
    """State the symbolic content of a small integer tensor."""
    value.meta[_DATA] = data


def forget_data(value: ir.Value) -> None:
    """Forget the content that was stated of a value."""
    if _DATA in notes_of(value):
        del value.meta[_DATA]


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute, or the default where the node does not state it."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """The index-th input of a node, None where it is missing or left empty."""
    return node.inputs[index] if index < len(node.inputs) else None


_remembered = functools.lru_cache(4096)  # the same few sizes come up in every layer, and sympy takes its time


def are_known(dims: Dims | None) -> bool:
    """Whether all dimensions are numbers or have a name or an expression."""
    return dims is not None and all(isinstance(d, int) or d.value is not None for d in dims)


def same_dims(x: ir.Value, y: ir.Value) -> bool:
    """Whether two values are known to have the same shape."""
    return are_known(dims_of(x)) and dims_of(x) == dims_of(y)


def sizes_of_inputs(graph: ir.Graph) -> set[Dim]:
    """The dimensions that a graph's inputs have."""
    return {dim for value in graph.inputs for dim in dims_of(value) or ()}


def names_a_size(x: ir.Value, y: ir.Value) -> bool:
    """Whether y has a size that depends on content under a name that x does not have; later sizes are made of it."""
    known, named = ({d.value for d in dims_of(v) or () if isinstance(d, ir.SymbolicDim)} for v in (x, y))
    return any(name and name.isidentifier() for name in named - known)


def simplify(dim: Dim) -> Dim:
    """A dimension with constant expressions turned into ``int``."""
    if isinstance(dim, int) or dim.value is None or dim.value.isidentifier():
        return dim
    return _simplified(dim)


@_remembered
def _simplified(dim: ir.SymbolicDim) -> Dim:
    return dim.evaluate({})


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dimensions: the number of elements of a shape."""
    return _product(tuple(dims))


@_remembered
def _product(dims: Dims) -> Dim:
    return simplify(math.prod(dims, start=1))  # type: ignore[arg-type]


@_remembered
def quotient(total: Dim, known: Dim) -> Dim:
    """``total / known`` where the division is known to be exact, as for the -1 of Reshape."""
    if isinstance(total, int) and isinstance(known, int):
        return total // known if known else 0
    return simplify(total / known)  # type: ignore[arg-type]


def as_expression(dim: Dim) -> sympy.Expr:
    """A dimension as a sympy expression over positive integer symbols."""
    return sympy.Integer(dim) if isinstance(dim, int) else dim._expr  # type: ignore


def fresh_dim(value: ir.Value, axis: int) -> ir.SymbolicDim:
    """A new symbol for a dimension that cannot be expressed in known ones; no other value's has its name."""
    plain = as_identifier(name := str(value.name))
    mark = "" if plain == name else f"_{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return ir.SymbolicDim(f"{plain}{mark}_dim{axis}")


def as_identifier(name: str) -> str:
    """A name as an identifier: what symbols are called."""
    made = re.sub(r"\W", "_", name)
    return made if made.isidentifier() else f"_{made}"


def fresh_dims(value: ir.Value, count: int) -> Dims:
    """New symbols for all dimensions of a value of that rank."""
    return tuple(fresh_dim(value, axis) for axis in range(count))


def rename_symbols(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Give symbols other names, in place: those with the same name are the same size from then on.

    Args:
        graph: its shapes and what is known of the content of its values change, those of bodies too.
        names: the new name by the old one.
    """
    inner = [body for node in graph.all_nodes() for body in bodies_of(node)]
    for value in (v for g in (graph, *inner) for v in (*g.inputs, *(v for n in g for v in n.outputs))):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(d, names) for d in value.shape])
        data = notes_of(value).get(_DATA)
        if isinstance(data, tuple):
            set_data(value, tuple(_renamed(d, names) for d in data))
        elif data is not None:
            set_data(value, _renamed(data, names))


def _renamed(dim: Dim, names: Mapping[str, str]) -> Dim:
    if isinstance(dim, int) or dim.value is None:
        return dim
    old = as_expression(dim)
    new = {s: as_expression(ir.SymbolicDim(names[str(s)])) for s in old.free_symbols if str(s) in names}
    return simplify(ir.SymbolicDim(cast(sympy.Expr, old.xreplace(new)))) if new else dim


def broadcast(*shapes: Dims, node: ir.Node | None = None) -> Dims:
    """The shape of multidirectional broadcasting (ONNX Broadcast.md).

    Where two different symbols meet, one may be 1 at run time: the result is their maximum.

    Raises:
        ShapeError: two constant dimensions differ and neither is 1.
    """
    width = max((len(s) for s in shapes), default=0)
    columns = zip(*[(1,) * (width - len(s)) + tuple(s) for s in shapes], strict=True)
    return tuple(_broadcast_dim(column, shapes, node) for column in columns)


def _broadcast_dim(column: Sequence[Dim], shapes: Sequence[Dims], node: ir.Node | None) -> Dim:
    constants = {d for d in column if isinstance(d, int) and d != 1}
    if len(constants) > 1:
        raise ShapeError(
            f"shapes {', '.join(map(str, shapes))} cannot be broadcast",
            node=describe(node) if node else "",
            source=source_of(node) if node else "",
        )
    if constants:
        return constants.pop()
    symbols = list(dict.fromkeys(d for d in column if not isinstance(d, int)))
    if len(symbols) > 1:
        return ir.SymbolicDim(sympy.Max(*(as_expression(d) for d in symbols)))
    return symbols[0] if symbols else 1


def infer(node: ir.Node, *, is_stated: bool = False) -> None:
    """Set type, shape and data of a node's outputs; what an output already states is kept and completed.

    Args:
        node: of a graph whose earlier nodes are inferred.
        is_stated: whether what the outputs state is known to be right.

    Raises:
        ShapeError: the inputs contradict each other, or what is known of an output.
    """
    from onnxtrain.ir import shape_rules  # noqa: F401  (fills RULES)

    places = ((node.domain, node.op_type), (node.domain, OTHERS), (OTHERS, OTHERS))
    rule = next(RULES[place] for place in places if place in RULES)
    for value, facts in zip(node.outputs, rule(node), strict=False):
        if is_stated and _is_contrary(value, facts):
            what = f"the result is {facts.dtype} {facts.dims}, not {value.dtype} {value.shape}"
            raise ShapeError(what, node=describe(node), source=source_of(node))
        _complete(value, facts)


def _is_contrary(stated: ir.Value, inferred: Facts) -> bool:
    """Whether a value cannot be what is inferred: of another type or rank, or with another constant."""
    if stated.dtype is not None and ir.DataType.UNDEFINED != inferred.dtype != stated.dtype:
        return True
    dims = dims_of(stated)
    if dims is None or inferred.dims is None:
        return False
    pairs = zip(dims, inferred.dims, strict=False)
    return len(dims) != len(inferred.dims) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    )


def infer_graph(graph: ir.Graph) -> None:
    """Run ``infer`` over all nodes in order."""
    for node in graph:
        infer(node)


def _complete(value: ir.Value, facts: Facts) -> None:
    if facts.dtype != ir.DataType.UNDEFINED and not isinstance(value.type, ir.SequenceType | ir.OptionalType):
        value.type = ir.TensorType(value.dtype or facts.dtype)
    if facts.dims is not None:
        stated = value.shape if value.shape is not None and len(value.shape) == len(facts.dims) else facts.dims
        better = [_better(old, new) for old, new in zip(stated, facts.dims, strict=True)]
        value.shape = ir.Shape([d if _is_told(d) else fresh_dim(value, i) for i, d in enumerate(better)])
    elif value.shape is not None and not are_known(dims_of(value)):  # only the rank is stated
        value.shape = ir.Shape([_better(d, fresh_dim(value, axis)) for axis, d in enumerate(value.shape)])
    if facts.data is not None and not _is_too_much(facts.data):
        value.meta[_DATA] = facts.data


def _is_too_much(data: Data) -> bool:
    """Whether content is no shape that anything could have: it is not followed then."""
    parts = data if isinstance(data, tuple) else (data,)
    return len(parts) > _LARGEST_DATA or any(_is_too_long(part) for part in parts)


def _is_told(dim: Dim) -> bool:
    """Whether a size is a number, or an expression that can be worked with."""
    return are_known((dim,)) and not _is_too_long(dim)


def _is_too_long(dim: Dim) -> bool:
    """Whether a number is none of int64, or an expression longer than can be worked with."""
    if isinstance(dim, int):
        return not -(2**63) <= dim < 2**63
    return dim.value is not None and len(dim.value) > _LONGEST_EXPRESSION


def _better(stated: Dim, inferred: Dim) -> Dim:
    if isinstance(stated, int) or isinstance(inferred, int):
        return stated if isinstance(stated, int) else inferred
    return stated if stated.value is not None else inferred
