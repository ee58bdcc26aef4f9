"""What a file states of shapes: names of dimensions become symbols, and inference has the last word.

Any text may name a dimension (``output-0_dim0``, ``batch size``, ``N/2``); two dimensions of one name have the same
size, and that is all a name says. Sizes that a file states of what nodes make may be wrong, as where somebody changed
the inputs alone: they count where inference does not know better.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import free_name


def name_dimensions(graph: ir.Graph, bodies: Iterable[ir.Graph]) -> None:
    """Make symbols of all names of dimensions, in place; dimensions of the graph's inputs that have no name get one."""
    every = [v for g in (graph, *bodies) for v in _values(g)]
    found, plain = [(v, v.shape) for v in every if v.shape is not None], {v: _plain(v) for v in every}
    names = collections.Counter(v.name for v in plain.values())
    own = [(n, axis) for v, shape in found for n in (v, plain[v]) for axis in range(len(shape))]
    taken = {shapes.fresh_dim(*place).value for place in own}
    symbols: dict[str, str] = {}
    for value, shape in found:
        value.shape = ir.Shape([_symbol(d, shapes.fresh_dim(value, i), symbols, taken) for i, d in enumerate(shape)])
    for value in (v for v in graph.inputs if not v.is_initializer()):
        dims = shapes.dims_of(value)
        if dims is not None:
            named = plain[value] if names[plain[value].name] == 1 else value
            value.shape = ir.Shape([d if _is_known(d) else shapes.fresh_dim(named, i) for i, d in enumerate(dims)])


def _plain(value: ir.Value) -> ir.Value:
    """One with an identifier as its name, which is nicer to read where no other has it."""
    return ir.Value(name=shapes.as_identifier(str(value.name)))


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _symbol(dim: shapes.Dim, own: ir.SymbolicDim, symbols: dict[str, str], taken: set[str | None]) -> shapes.Dim | None:
    """The dimension under a name that is an identifier and no other's; None where its size is not said."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None  # some exporters write -1
    if not dim.value:
        return None
    if dim.value not in symbols:
        wanted = shapes.as_identifier(dim.value)
        is_free = wanted == own.value and wanted not in symbols.values()
        symbols[dim.value] = wanted if is_free else free_name(wanted, taken)
        taken.add(symbols[dim.value])
    return ir.SymbolicDim(symbols[dim.value])


def _is_known(dim: shapes.Dim) -> bool:
    return isinstance(dim, int) or dim.value is not None


def infer(node: ir.Node) -> None:
    """Infer types and shapes of a node's outputs; what the file states of them fills what is not known then.

    Raises:
        ShapeError: the inputs contradict each other.
    """
    stated = [(v, v.shape) for v in node.outputs if v.shape is not None]
    for value, shape in stated:
        value.shape = ir.Shape([None] * len(shape))
    shapes.infer(node)
    for value, shape in stated:
        assert value.shape is not None
        if len(value.shape) == len(shape):
            value.shape = ir.Shape([_filled(value, i, d, shape[i]) for i, d in enumerate(value.shape)])


def _filled(value: ir.Value, axis: int, inferred: shapes.Dim, stated: shapes.Dim) -> shapes.Dim:
    own = shapes.fresh_dim(value, axis)
    if not _is_known(inferred) or inferred == own:
        return stated if _is_known(stated) else own
    return inferred
