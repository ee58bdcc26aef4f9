"""Builder: ``op.MatMul(a, b)`` adds a node, typed and shaped at once; ``dy * (1 - y * y)`` reads as mathematics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import functions, shapes
from onnxtrain.ir.graphs import BACKWARD, DOMAIN, free_name


class Builder:
    """Adds nodes to a graph; every new value has a type and a shape the moment it exists.

    Args:
        graph: the graph to grow.
        before: node before which new nodes are inserted; None appends.
        backward: mark new nodes as part of the backward pass.
        names: names that values have; new values get others and are added. Where it is None, onnx_ir names them, which
            does not see the names of inputs that came after the first node.

    ``builder.Softmax(x, axis=-1)`` emits a standard operator, or one of ours where the name is in
    ``ir.functions``. Operands may be values, numbers (made constants of the other operand's type) or None.
    With ``outputs=n`` (n > 1) a tuple of values comes back.
    """

    def __init__(
        self,
        graph: ir.Graph,
        *,
        before: ir.Node | None = None,
        backward: bool = False,
        names: set[str] | None = None,
    ) -> None:
        self.graph, self.before, self.backward, self.names = graph, before, backward, names
        self.metadata: dict[str, str] = {}
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._reserved: set[str] | None = None  # names of the user's values that a constant could have

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        domain = DOMAIN if functions.defines(op_type) else ""

        def emit(*operands: Any, outputs: int = 1, name: str | None = None, **attributes: Any) -> Any:
            made = self.node(op_type, operands, attributes, domain=domain, outputs=outputs, name=name)
            return made.outputs[0] if outputs == 1 else tuple(made.outputs)

        return emit

    def node(
        self,
        op_type: str,
        operands: Sequence[Any],
        attributes: dict[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: int = 1,
        name: str | None = None,
        like: Sequence[ir.Value] = (),
    ) -> ir.Node:
        """Add one node and infer its outputs; ``like`` states types and shapes of outputs that no rule can infer."""
        inputs = self._as_values(operands)
        while inputs and inputs[-1] is None:
            inputs.pop()
        given = {k: v for k, v in (attributes or {}).items() if v is not None}
        made = ir.Node(
            domain,
            op_type,
            inputs,
            attributes=ir.convenience.convert_attributes(given),
            num_outputs=outputs,
            metadata_props=dict(self.metadata),
        )
        if self.backward:
            made.meta[BACKWARD] = True
        if self.before is None:
            self.graph.append(made)
        else:
            self.graph.insert_before(self.before, made)
        if name:
            made.outputs[0].name = name
        for value in made.outputs if self.names is not None else ():
            self._claim(value)
        for value, model in zip(made.outputs, like, strict=False):
            value.type, value.shape = model.type, model.shape
        if not like:
            shapes.infer(made)
        return made

    def _claim(self, value: ir.Value) -> None:
        """Let a new value have a name that no other has."""
        assert self.names is not None
        value.name = free_name(str(value.name), self.names)
        self.names.add(value.name)

    def constant(self, content: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant as an initializer; equal small constants share one value."""
        array = np.asarray(content) if dtype is None else np.asarray(content).astype(dtype.numpy())
        key = (array.dtype.str, str(array.dtype), array.shape, array.tobytes()) if array.size <= 64 else (id(array),)
        if key not in self._constants:
            value = ir.val(self._constant_name(), const_value=ir.tensor(array, dtype=dtype))
            if self.names is not None:
                self._claim(value)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def ints(self, *content: int) -> ir.Value:
        """A constant int64 vector: axes, starts, shapes."""
        return self.constant(np.array(content, np.int64))

    def like(self, number: float, value: ir.Value) -> ir.Value:
        """A scalar constant in the element type of ``value``, double staying double."""
        return self.constant(number, shapes.dtype_of(value))

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of one axis as an int64 vector of one element."""
        axis %= shapes.rank(value)
        return self.Shape(value, start=axis, end=axis + 1)

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of a value as an int64 vector: a constant where all dimensions are."""
        dims = shapes.dims_of(value)
        if dims is not None and all(isinstance(d, int) for d in dims):
            return self.ints(*dims)  # type: ignore[arg-type]
        return self.Shape(value)

    def share(self, value: ir.Value, parts: ir.Value) -> ir.Value:
        """How many elements of a value there are for each of its parts; 1 where there are no parts."""
        if 0 in (shapes.dims_of(parts) or ()):
            return self.constant(np.array(1, np.int64))
        return self.Div(self.Size(value), self.Size(parts))

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in another element type; itself where nothing changes."""
        return value if value.dtype == dtype else self.Cast(value, to=int(dtype))

    def transpose(self, value: ir.Value, axis0: int = -2, axis1: int = -1) -> ir.Value:
        """The value with two axes exchanged."""
        order = list(range(shapes.rank(value)))
        order[axis0], order[axis1] = order[axis1], order[axis0]
        return self.Transpose(value, perm=order)

    def Neg(self, value: ir.Value) -> ir.Value:
        """Negation; also what ``-value`` means."""
        return self.node("Neg", [value]).outputs[0]

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[Builder]:
        """Within it, ``+ - * /`` between values add nodes through this builder."""
        previous = ir.set_value_magic_handler(self)  # type: ignore[arg-type]
        try:
            yield self
        finally:
            ir.set_value_magic_handler(previous)

    def _as_values(self, operands: Sequence[Any]) -> list[ir.Value | None]:
        model = next((v for v in operands if isinstance(v, ir.Value)), None)
        made: list[ir.Value | None] = []
        for operand in operands:
            if operand is None or isinstance(operand, ir.Value):
                made.append(operand)
            elif isinstance(operand, int | float) and model is not None:
                made.append(self.like(operand, model))
            else:
                made.append(self.constant(operand))
        return made

    def _constant_name(self) -> str:
        if self._reserved is None:
            values = (*self.graph.inputs, *(v for node in self.graph for v in node.outputs))
            self._reserved = {v.name for v in values if v.name and v.name.startswith("const_")}
        count = len(self.graph.initializers)
        while f"const_{count}" in self.graph.initializers or f"const_{count}" in self._reserved:
            count += 1
        return f"const_{count}"
