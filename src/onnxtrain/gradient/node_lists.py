"""Gradients written as lists of nodes, the form that onnxruntime-training took them in: each list becomes a rule."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.gradient.registry import STOP_EDGES, Context, Key, Rule, gradient
from onnxtrain.ir.graphs import DOMAIN

NodeList: TypeAlias = Sequence[Sequence[Any]]
_DOMAINS = {"org.pytorch.aten": DOMAIN, "ai.onnx": ""}  # names that mean a domain of ours
_PLACE = re.compile(r"(I|O|GO|GI|IElemType|OElemType)\((\d+)\)")
_DTYPES = {
    "int": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "float": ir.DataType.FLOAT,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "double": ir.DataType.DOUBLE,
    "float64": ir.DataType.DOUBLE,
    "bool": ir.DataType.BOOL,
}


def register_gradient(
    domain: str, name: str, *attributes: str, replace: bool = False
) -> Callable[[Callable[[], NodeList]], Callable[[], NodeList]]:
    """Register the gradient of an operator as a list of nodes.

    The decorated function takes nothing and returns a list of ``(operator, inputs, outputs)`` or ``(operator, inputs,
    outputs, attributes)``. An operator is a name, or a name and its domain. Inputs are ``"I(i)"``, ``"O(i)"`` and
    ``"GO(i)"``, the i-th input and output of the forward node and the gradient of that output, or outputs of earlier
    nodes of the list; outputs are ``"GI(i)"``, the gradient of the i-th input, or names of your own. An attribute is
    ``{"value": v, "dtype": t, "is_tensor": b}``, where ``t`` is ``"int"``, ``"float"``, ``"bool"``, ``"string"``, an
    element type, or ``"IElemType(i)"`` or ``"OElemType(i)"``, that of an input or output.

    Args:
        domain: the operator's domain; ``"org.pytorch.aten"`` is where operators of torch live.
        name: the operator; ``"ATen"`` for any operator of torch, whose inputs are then its arguments in order.
        attributes: for ``"ATen"`` the operator and its overload: ``"aten::cummax", ""``.
        replace: take the place of a gradient that is there already.

    Raises:
        ValueError: the operator has a gradient already, or the list has another form than the above.
    """

    def register(function: Callable[[], NodeList]) -> Callable[[], NodeList]:
        domain_, op_type, *of = _key(domain, name, attributes)
        rule = as_rule([_entry(e, f"{name}, entry {i}") for i, e in enumerate(function())], function.__doc__ or "")
        gradient(op_type, domain=domain_, of=of, replace=replace)(rule)
        return function

    return register


def register_custom_stop_gradient_edges(edges: Sequence[int], domain: str, name: str, *attributes: str) -> None:
    """Let no gradient flow through some inputs of an operator.

    Args:
        edges: positions of the inputs; for ``"ATen"`` of the arguments that are tensors.
        domain: the operator's domain.
        name: the operator.
        attributes: for ``"ATen"`` the operator and its overload.
    """
    STOP_EDGES[_key(domain, name, attributes)] = frozenset(edges)


def _key(domain: str, name: str, attributes: Sequence[str]) -> Key:
    return (_DOMAINS.get(domain, domain), name, *attributes)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One node of a list."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Mapping[str, Any]]


def _entry(given: Sequence[Any], where: str) -> Entry:
    if len(given) not in (3, 4):
        raise ValueError(f"{where}: a node is (operator, inputs, outputs) or (operator, inputs, outputs, attributes)")
    operator, inputs, outputs = given[:3]
    op_type, domain = (operator, "") if isinstance(operator, str) else operator
    attributes = given[3] if len(given) == 4 else {}
    for name, attribute in attributes.items():
        if not isinstance(attribute, Mapping) or not {"value", "dtype"} <= set(attribute):
            raise ValueError(f"{where}: the attribute {name} is no {{'value': …, 'dtype': …}}")
    return Entry(op_type, _DOMAINS.get(domain, domain), tuple(inputs), tuple(outputs), attributes)


def as_rule(entries: Sequence[Entry], about: str = "") -> Rule:
    """The rule that emits a list of nodes."""

    def rule(ctx: Context, dy: ir.Value | None, *inputs: ir.Value | None, **_: Any) -> tuple[ir.Value | None, ...]:
        scope = _Scope(ctx)
        for entry in entries:
            scope.emit(entry)
        return scope.gradients()

    rule.__doc__ = about or f"{len(entries)} nodes, registered as a list."
    return rule


@dataclasses.dataclass(frozen=True)
class _Left:
    """An argument that the call of a torch operator left at its default."""

    position: int


class _Scope:
    """What the names of a list stand for while its nodes are emitted."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.named = ctx, {}
        self.is_aten = ctx.node.op_type == "ATen" and ctx.node.domain == DOMAIN
        recorded = json.loads(ctx.node.attributes["arguments"].as_string()) if self.is_aten else []
        self.arguments: list[Any] = [self._argument(a) for a in recorded] if self.is_aten else list(ctx.node.inputs)

    def _argument(self, recorded: Any) -> Any:
        if isinstance(recorded, dict) and "input" in recorded:
            return self.ctx.node.inputs[recorded["input"]]
        return recorded

    def gradients(self) -> tuple[ir.Value | None, ...]:
        """What the list gave for each input of the forward node."""
        return tuple(self.named.get(f"GI({self._position(i)})") for i in range(len(self.ctx.node.inputs)))

    def _position(self, index: int) -> int | None:
        """Which argument an input of the forward node is; None for one in a list of tensors."""
        if not self.is_aten:
            return index
        recorded = json.loads(self.ctx.node.attributes["arguments"].as_string())
        return next((i for i, a in enumerate(recorded) if a == {"input": index}), None)

    def emit(self, entry: Entry) -> None:
        """Add one node of the list."""
        if entry.op_type == "Constant" and not entry.domain and "value" in entry.attributes:
            given = entry.attributes["value"]
            self.named[entry.outputs[0]] = self.ctx.op.constant(given["value"], self._dtype(given["dtype"]))
            return
        operands = [self._operand(name) for name in entry.inputs]
        attributes = {name: self._attribute(given) for name, given in entry.attributes.items()}
        like: list[ir.Value] = []
        if entry.op_type == "ATen" and entry.domain == DOMAIN:
            operands, attributes, like = self._call(entry, operands, attributes)
        elif any(isinstance(o, _Left) for o in operands):
            raise self._error(f"{entry.op_type} reads an argument that the call left at its default")
        made = self.ctx.op.node(
            entry.op_type, operands, attributes, domain=entry.domain, outputs=len(entry.outputs), like=like
        )
        self.named |= dict(zip(entry.outputs, made.outputs, strict=True))

    def _call(self, entry: Entry, operands: Sequence[Any], attributes: dict[str, Any]) -> tuple[Any, Any, Any]:
        """A call of a torch operator as our ATen node; of its outputs only gradients have a known type."""
        values = [o for o in operands if isinstance(o, ir.Value)]
        places = iter(range(len(values)))
        forward = self.ctx.node.attributes["operator"].as_string() if self.is_aten else ""
        overload = self.ctx.node.attributes["overload"].as_string() if self.is_aten else ""
        arguments = [
            {"input": next(places)}
            if isinstance(o, ir.Value)
            else {"default": [forward, overload, o.position]}
            if isinstance(o, _Left)
            else o
            for o in operands
        ]
        like = []
        for name in entry.outputs:
            found = _PLACE.fullmatch(name)
            if found is None or found[1] != "GI":
                raise self._error(f"the type of {name}, an output of {attributes.get('operator')}, is not known")
            like.append(self.arguments[int(found[2])])
        call = {"operator": attributes["operator"], "overload": attributes.get("overload") or "default"}
        return values, {**call, "arguments": json.dumps(arguments), "keywords": "{}"}, like

    def _operand(self, name: str) -> Any:
        found = _PLACE.fullmatch(name)
        if found is None or found[1] == "GI" or name in self.named:
            if name and name not in self.named:
                raise self._error(f"{name} is no output of an earlier node of the list")
            return self.named[name] if name else None
        index = int(found[2])
        if found[1] == "GO":
            return self._output_gradient(index)
        if found[1] == "O":
            return self.ctx.output(index)
        if index >= len(self.arguments):
            return _Left(index) if self.is_aten else None
        return self.arguments[index]

    def _output_gradient(self, index: int) -> ir.Value:
        """The gradient of an output; zeros where it receives none."""
        dy = self.ctx.dys[index] if index < len(self.ctx.dys) else None
        if dy is not None:
            return dy
        y = self.ctx.output(index)
        return self.ctx.op.Expand(self.ctx.op.like(0.0, y), self.ctx.op.shape(y))

    def _attribute(self, given: Mapping[str, Any]) -> Any:
        value, dtype = given["value"], given["dtype"]
        if given.get("is_tensor"):
            element = self._dtype(dtype)
            return ir.tensor(np.asarray(value).astype(element.numpy()), dtype=element)
        if isinstance(value, str) and _PLACE.fullmatch(value):
            return int(self._dtype(value))
        if dtype == "float":
            return [float(v) for v in value] if isinstance(value, list | tuple) else float(value)
        if dtype == "bool":
            return int(value)
        return list(value) if isinstance(value, list | tuple) else value

    def _dtype(self, name: str) -> ir.DataType:
        found = _PLACE.fullmatch(name)
        if found is not None and found[1].endswith("ElemType"):
            index = int(found[2])
            value = self.arguments[index] if found[1] == "IElemType" else self.ctx.output(index)
            if isinstance(value, ir.Value) and value.dtype is not None:
                return value.dtype
        if name not in _DTYPES:
            raise self._error(f"there is no element type {name}")
        return _DTYPES[name]

    def _error(self, what: str) -> GradientError:
        return self.ctx.unsupported(f"the registered gradient of {self.ctx.node.op_type}: {what}; it")
