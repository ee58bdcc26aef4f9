"""The graph that says, before anything else runs, which rows of a batch are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize.rows.attention import QUERY
from onnxtrain.optimize.rows.demand import Liveness
from onnxtrain.optimize.rows.packing import Within
from onnxtrain.optimize.rows.sets import Evaluator, RowSet, is_within

COUNTS = "counts"  # output: how many rows each set has, and whether a needed query sees no key


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A graph over a call's inputs.

    Its outputs are, in order: for each set, whether a row is in it, over all rows; for each outer set, how many of its
    rows come before each row (int64); and ``COUNTS`` (int64), all that the host has to know.

    Args:
        graph: the graph.
        sets: the sets.
        pairs: those that lie within others.
        outer: the sets that others lie within.
        totals: for each set, the number of all rows, as a symbolic expression.
    """

    graph: ForwardGraph
    sets: tuple[RowSet, ...]
    pairs: tuple[Within, ...]
    outer: tuple[RowSet, ...]
    totals: dict[RowSet, shapes.Dim]


def inspection(liveness: Liveness, sets: Sequence[RowSet]) -> Inspection:
    """The graph that evaluates sets of rows.

    Args:
        liveness: where the sets come from.
        sets: the sets.
    """
    source = liveness.graph
    model = ir.Model(source.model.graph.clone(), ir_version=source.model.ir_version)
    graph = model.graph
    graph.outputs.clear()
    evaluator = Evaluator(graph, liveness.attentions)
    pairs = tuple(Within(a, b) for a in sets for b in sets if a != b and is_within(a, b))
    outer = tuple(dict.fromkeys(pair.outer for pair in pairs))
    found = {f"rows_{i}": evaluator.op.Identity(evaluator.mask(s)) for i, s in enumerate(sets)}
    found |= {f"before_{i}": _before(evaluator, s) for i, s in enumerate(outer)}
    found[COUNTS] = _counts(evaluator, sets, _blind(evaluator, liveness, sets))
    for name, value in found.items():
        value.name = name
        graph.outputs.append(value)
    remove_unread(graph)
    signature = dataclasses.replace(source.signature, outputs=tuple(found), buffer_updates={}, differentiable=())
    return Inspection(ForwardGraph(model, signature), tuple(sets), pairs, outer, _totals(liveness, sets))


def _before(evaluator: Evaluator, rows: RowSet) -> ir.Value:
    """For each row, how many rows of the set come before it."""
    op = evaluator.op
    return op.CumSum(op.cast(evaluator.mask(rows), ir.DataType.INT64), op.constant(0), exclusive=1)


def _counts(evaluator: Evaluator, sets: Sequence[RowSet], blind: ir.Value) -> ir.Value:
    op, kind = evaluator.op, ir.DataType.INT64
    counts = [op.ReduceSum(op.cast(evaluator.mask(s), kind), op.ints(0), keepdims=1) for s in sets]
    return op.Concat(*counts, op.Reshape(op.cast(blind, kind), op.ints(1)), axis=0)


def _blind(evaluator: Evaluator, liveness: Liveness, sets: Sequence[RowSet]) -> ir.Value:
    found: dict[object, ir.Value | None] = {}
    for attention in liveness.attentions:
        needed = liveness.rows_of(attention.output)
        if needed is None or needed.layout != QUERY or not all(map(liveness.sizes.knows, attention.space)):
            continue  # of three axes, the first is that of heads: its rows are no queries
        key = (str(attention.masks), attention.space, needed.rows)
        if key not in found:
            found[key] = evaluator.blind(str(attention.output.name), needed.rows)
    op = evaluator.op
    total = op.constant(False)
    for value in found.values():
        total = total if value is None else op.Or(total, value)
    return total


def _totals(liveness: Liveness, sets: Sequence[RowSet]) -> dict[RowSet, shapes.Dim]:
    found: dict[RowSet, shapes.Dim] = {}
    for value in liveness.demands:
        rows = liveness.rows_of(value)
        if rows is not None and rows.rows in sets:
            found.setdefault(rows.rows, shapes.product(shapes.known_dims(value)[a] for a in rows.layout))
    return found
