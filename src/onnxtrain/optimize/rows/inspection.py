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

BLIND = "blind"  # output: whether a needed query sees no key


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A graph over a call's inputs.

    Args:
        graph: its outputs are ``holds``, in order, and then ``BLIND``.
        holds: the rows of a set (int64, ascending), or their places within another set.
        totals: for each set, the number of all rows, as a symbolic expression.
    """

    graph: ForwardGraph
    holds: tuple[RowSet | Within, ...]
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
    op = evaluator.op
    holds: list[RowSet | Within] = list(sets)
    holds += [Within(a, b) for a in sets for b in sets if a != b and is_within(a, b)]
    rows = {s: op.Squeeze(op.NonZero(evaluator.mask(s)), op.ints(0)) for s in sets}
    for index, held in enumerate(holds):
        made = _places(evaluator, held, rows[held.rows]) if isinstance(held, Within) else rows[held]
        made.name = f"held_{index}"
        graph.outputs.append(made)
    blind = _blind(evaluator, liveness, sets)
    blind.name = BLIND
    graph.outputs.append(blind)
    remove_unread(graph)
    outputs = tuple(str(v.name) for v in graph.outputs)
    signature = dataclasses.replace(source.signature, outputs=outputs, buffer_updates={}, differentiable=())
    return Inspection(ForwardGraph(model, signature), tuple(holds), _totals(liveness, sets))


def _places(evaluator: Evaluator, held: Within, rows: ir.Value) -> ir.Value:
    """For each row of the inner set, how many rows of the outer one come before it."""
    op = evaluator.op
    counted = op.CumSum(op.cast(evaluator.mask(held.outer), ir.DataType.INT64), op.constant(0), exclusive=1)
    return op.Gather(counted, rows, axis=0)


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
    return op.Identity(total)


def _totals(liveness: Liveness, sets: Sequence[RowSet]) -> dict[RowSet, shapes.Dim]:
    found: dict[RowSet, shapes.Dim] = {}
    for value in liveness.demands:
        rows = liveness.rows_of(value)
        if rows is not None and rows.rows in sets:
            found.setdefault(rows.rows, shapes.product(shapes.known_dims(value)[a] for a in rows.layout))
    return found
