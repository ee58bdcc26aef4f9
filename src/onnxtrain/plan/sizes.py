"""Sizes that a backward pass reads, taken from what is there anyway rather than from values of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import sympy

from onnxtrain.errors import GraphError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.concrete import bytes_of
from onnxtrain.ir.graphs import is_backward

_SMALL = 2**16  # bytes that may be alive for the sake of sizes


def free_sizes(graph: ir.Graph, largest: ir.Graph) -> None:
    """Let nodes of a backward pass that read no more than the sizes of a forward value compute them, in place.

    A runtime that runs such a node late keeps the value for it. Sizes are numbers, those of inputs and of small values,
    and arithmetic with these; a node for which that is not enough stays.

    Args:
        graph: forward and backward.
        largest: the same nodes with the sizes of the largest batch.
    """
    _Sizes(graph, largest).free()


class _Sizes:
    """The sizes of a graph, each computed once, right before its backward pass.

    Args:
        graph: forward and backward.
        largest: the same nodes with the sizes of the largest batch.
    """

    def __init__(self, graph: ir.Graph, largest: ir.Graph) -> None:
        self.graph = graph
        self.op = Builder(graph, before=next((n for n in graph if is_backward(n)), None))
        self.known: dict[sympy.Expr, ir.Value] = {}
        pairs = zip(graph, largest, strict=True)
        made = [pair for n, m in pairs if not is_backward(n) for pair in zip(n.outputs, m.outputs, strict=True)]
        self.places: dict[str, tuple[ir.Value, int]] = {}
        for value in (*graph.inputs, *(v for v, large in made if 0 < (bytes_of(large, {}) or 0) <= _SMALL)):
            for axis, dim in enumerate(shapes.dims_of(value) or ()):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    self.places.setdefault(dim.value, (value, axis))

    def free(self) -> None:
        """Replace the nodes for which it can be done."""
        done = []
        for node in [n for n in self.graph if is_backward(n) and n.domain == "" and n.op_type in ("Shape", "Size")]:
            source, data = node.inputs[0], shapes.data_of(node.outputs[0])
            producer = None if source is None else source.producer()
            if producer is None or is_backward(producer) or data is None:
                continue
            try:
                made = self._vector(data if isinstance(data, tuple) else (data,))
            except GraphError:
                continue
            node.outputs[0].replace_all_uses_with(made if isinstance(data, tuple) else self.op.Squeeze(made))
            done.append(node)
        self.graph.remove(done, safe=True)

    def _vector(self, dims: Sequence[shapes.Dim]) -> ir.Value:
        if all(isinstance(d, int) for d in dims):
            return self.op.ints(*dims)  # type: ignore[arg-type]
        found = [self._value(shapes.as_expression(d)) for d in dims]
        return found[0] if len(found) == 1 else self.op.Concat(*found, axis=0)

    def _value(self, size: sympy.Expr) -> ir.Value:
        """A size as a vector of one number.

        Raises:
            GraphError: it cannot be computed.
        """
        if size not in self.known:
            self.known[size] = self._made(size)
        return self.known[size]

    def _made(self, size: sympy.Expr) -> ir.Value:
        if size.is_Integer:
            return self.op.ints(int(size))
        if str(size) in self.places:
            value, axis = self.places[str(size)]
            return self.op.Shape(value, start=axis, end=axis + 1)
        above, below = sympy.fraction(size)
        if below != 1:
            return self.op.Div(self._value(above), self._value(below))
        if isinstance(size, sympy.floor):
            return self._value(size.args[0])  # type: ignore[arg-type]  (division of integers rounds down)
        if not isinstance(size, sympy.Add | sympy.Mul | sympy.Max | sympy.Min):
            raise GraphError(f"the size {size} cannot be computed")
        made, *more = (self._value(part) for part in size.args)  # type: ignore[arg-type]
        for part in more:
            made = self.op.node(type(size).__name__, [made, part]).outputs[0]
        return made
