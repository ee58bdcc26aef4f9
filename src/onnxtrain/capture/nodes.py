"""What translations add ONNX nodes to.

``op.Name(...)`` adds a node: inputs come first, then attributes by name; what is left out has the default that ONNX
states. A number of Python's becomes a constant, in the type of the inputs that it has to agree with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN

OPSET = 20  # whose operators translations call
EXACT = "exact"  # in the ``meta`` of a float32 constant: the number as Python had it


class Value(ir.Value):
    """A value of the graph that translations can compute with."""

    @property
    def rank(self) -> int | None:
        """How many axes it has; None where that is not known."""
        return None if self.shape is None else len(self.shape)

    def __mod__(self, other: Any) -> Any:
        floating = self.dtype is not None and self.dtype.is_floating_point()
        return op.Mod(self, other, fmod=1) if floating else op.Mod(self, other)

    def __ne__(self, other: object) -> Any:
        return op.Not(op.Equal(self, other))

    def __neg__(self) -> Any:
        return op.Neg(self)

    def __add__(self, other: Any) -> Any:
        return op.Add(self, other)

    def __radd__(self, other: Any) -> Any:
        return op.Add(other, self)

    def __rand__(self, other: Any) -> Any:
        return op.And(other, self)

    def __mul__(self, other: Any) -> Any:
        return op.Mul(self, other)

    def __rmul__(self, other: Any) -> Any:
        return op.Mul(other, self)

    def __matmul__(self, other: Any) -> Any:
        return op.MatMul(self, other)

    def __pow__(self, other: Any) -> Any:
        return op.Pow(self, other)

    def __sub__(self, other: Any) -> Any:
        return op.Sub(self, other)

    def __rsub__(self, other: Any) -> Any:
        return op.Sub(other, self)

    def __truediv__(self, other: Any) -> Any:
        return op.Div(self, other)

    def __lt__(self, other: Any) -> Any:
        return op.Less(self, other)

    def __le__(self, other: Any) -> Any:
        return op.LessOrEqual(self, other)

    def __ge__(self, other: Any) -> Any:
        return op.GreaterOrEqual(self, other)

    def __gt__(self, other: Any) -> Any:
        return op.Greater(self, other)

    __hash__ = ir.Value.__hash__


class Nodes:
    """The nodes that the translations of one graph add, in order.

    Attributes:
        added: those since they were last taken.
        constants: those that numbers became, by number and type.
    """

    def __init__(self) -> None:
        self.added: list[ir.Node] = []
        self.constants: dict[Any, ir.Value] = {}

    def taken(self) -> list[ir.Node]:
        """What was added since the last time."""
        nodes, self.added[:] = list(self.added), []
        return nodes

    def constant(self, number: Any, dtype: ir.DataType) -> ir.Value:
        """A number, or a list of them, as a constant of a type; again the same one."""
        key = (repr(number), dtype)
        if key not in self.constants:
            made = op.Constant(value=ir.tensor(number, dtype=dtype))
            if dtype == ir.DataType.FLOAT and isinstance(number, float):
                made.meta[EXACT] = number
            self.constants[key] = made
        return self.constants[key]


_CURRENT: list[Nodes] = []


@contextlib.contextmanager
def added_to(nodes: Nodes) -> Iterator[None]:
    """Within it translations add their nodes here."""
    _CURRENT.append(nodes)
    try:
        yield
    finally:
        _CURRENT.pop()


def current() -> Nodes:
    """Where translations add their nodes now."""
    return _CURRENT[-1]


def record_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    outputs: int = 1,
    domain: str = DOMAIN,
) -> Any:
    """Add an operator, by default one of ours, to the graph; several outputs are a tuple."""
    given = ir.convenience.convert_attributes(dict(attributes or {}))
    return _add(domain, op_type, inputs, given, outputs)


def _add(
    domain: str, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr], outputs: int
) -> Any:
    made = [Value() for _ in range(outputs)]
    current().added.append(ir.Node(domain, op_type, inputs, attributes=attributes, outputs=made))
    return made[0] if outputs == 1 else tuple(made)


@dataclasses.dataclass(frozen=True)
class _Input:
    """What ONNX says of an input: the types that it shares with others, and its own where there is just one."""

    types: str
    alone: ir.DataType | None
    is_variadic: bool
    is_sequence: bool


@dataclasses.dataclass(frozen=True)
class _Form:
    """What ONNX says of an operator."""

    inputs: tuple[_Input, ...]
    attributes: Mapping[str, ir.AttributeType]
    defaults: Mapping[str, ir.Attr]
    required: frozenset[str]
    outputs: int


@functools.cache
def _form(op_type: str) -> _Form:
    """Raises ``onnx.defs.SchemaError`` where ONNX has no such operator."""
    schema = onnx.defs.get_schema(op_type, OPSET, "")
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    inputs = []
    for one in schema.inputs:
        types = allowed.get(one.type_str, [one.type_str])
        alone = _type_named(types[0]) if len(types) == 1 else None
        variadic = one.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        inputs.append(_Input(one.type_str, alone, variadic, all(t.startswith("seq(") for t in types)))
    attributes = {name: ir.AttributeType(int(a.type.value)) for name, a in schema.attributes.items()}
    defaults = {n: ir.from_proto(a.default_value) for n, a in schema.attributes.items() if a.default_value.name}
    required = frozenset(n for n, a in schema.attributes.items() if a.required)
    return _Form(tuple(inputs), attributes, defaults, required, len(schema.outputs))


def _type_named(text: str) -> ir.DataType | None:
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    return ir.DataType.__members__.get(name)


class _Operators:
    """ONNX's operators, as functions of values that add a node."""

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        made = functools.partial(_call, op_type, _form(op_type))
        setattr(self, op_type, made)
        return made


op: Any = _Operators()


def _call(op_type: str, form: _Form, *args: Any, **attributes: Any) -> Any:
    if len(args) > len(form.inputs) and not (form.inputs and form.inputs[-1].is_variadic):
        raise TypeError(f"{op_type} has {len(form.inputs)} inputs, not {len(args)}; attributes have names")
    inputs = _inputs(form, args)
    given = {name: value for name, value in attributes.items() if value is not None}
    if missing := form.required - given.keys():
        raise TypeError(f"{op_type} needs {', '.join(sorted(missing))}")
    made = [ir.Attr(n, form.attributes[n], _attribute(form.attributes[n], v)) for n, v in given.items()]
    made += [default for name, default in form.defaults.items() if name not in given]
    return _add("", op_type, inputs, made, _count(op_type, form, given))


def _count(op_type: str, form: _Form, attributes: Mapping[str, Any]) -> int:
    """How many outputs a node has."""
    if op_type == "Split":
        return attributes["num_outputs"]
    if op_type == "BatchNormalization" and not attributes.get("training_mode"):
        return 1
    return form.outputs


_AS = {ir.AttributeType.FLOAT: float, ir.AttributeType.INT: int, ir.AttributeType.INTS: list}


def _attribute(kind: ir.AttributeType, value: Any) -> Any:
    return _AS[kind](value) if kind in _AS else value


def _inputs(form: _Form, args: Sequence[Any]) -> list[ir.Value | None]:
    """The values of a node's inputs, constants among them; those left out at the end are none of them."""
    roles = [form.inputs[min(i, len(form.inputs) - 1)] for i in range(len(args))]
    bound = {r.types: a.dtype for r, a in zip(roles, args, strict=True) if isinstance(a, ir.Value) and a.dtype}
    made = [_input(role, arg, bound.get(role.types, role.alone)) for role, arg in zip(roles, args, strict=True)]
    while made and made[-1] is None:
        made.pop()
    return made


def _input(role: _Input, arg: Any, dtype: ir.DataType | None) -> ir.Value | None:
    if arg is None or isinstance(arg, ir.Value):
        return arg
    if role.is_sequence:
        return op.SequenceConstruct(*arg)
    if isinstance(arg, ir.TensorProtocol):
        return op.Constant(value=arg)
    constant = current().constant
    if isinstance(arg, list | tuple) and any(isinstance(a, ir.Value) for a in arg):
        kind = dtype or _type_of(arg)
        one = op.Constant(value_ints=[-1])
        parts = (op.Reshape(a, one) if isinstance(a, ir.Value) else constant([a], kind) for a in arg)
        return op.Concat(*parts, axis=0)
    return constant(arg, dtype or _type_of(arg))


def _type_of(number: Any) -> ir.DataType:
    """The type of a number where nothing else says it; of several that of a value, else the widest."""
    if not isinstance(number, list | tuple):
        kinds: Mapping[type, ir.DataType] = {bool: ir.DataType.BOOL, float: ir.DataType.FLOAT, int: ir.DataType.INT64}
        return kinds[type(number)]
    for one in number:
        if isinstance(one, ir.Value) and one.dtype is not None:
            return one.dtype
    return ir.DataType.FLOAT if any(isinstance(n, float) for n in number) else ir.DataType.INT64


__all__ = ["EXACT", "OPSET", "Nodes", "Value", "added_to", "current", "op", "record_node"]
