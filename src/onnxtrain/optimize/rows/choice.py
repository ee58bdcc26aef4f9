"""Which sets of rows are worth computing for."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.rows.demand import Liveness
from onnxtrain.optimize.rows.passages import Layout, passage_of
from onnxtrain.optimize.rows.sets import Reachable, RowSet, text_of, union


def chosen_sets(liveness: Liveness) -> list[RowSet]:
    """The sets of rows that are worth packing for: those that an expensive node would be computed for, largest last."""
    count: dict[RowSet, int] = {}
    for node in liveness.graph.model.graph:
        found = node_rows(liveness, node)
        if found is not None and Trait.EXPENSIVE in traits_of(node) and passage_of(node, found[0]) is not None:
            count[found[1]] = count.get(found[1], 0) + 1
    for attention in liveness.attentions:
        rows = liveness.rows_of(attention.output)
        if rows is not None and attention.is_plain:
            count[rows.rows] = count.get(rows.rows, 0) + 1
    return sorted(count, key=lambda s: (any(isinstance(r, Reachable) for r in s), count[s], text_of(s)))


def node_rows(liveness: Liveness, node: ir.Node) -> tuple[Layout, RowSet] | None:
    """The rows needed of a node's outputs, where all have the same layout and set."""
    found = [liveness.demands[v] for v in node.outputs if v in liveness.demands]
    rows = [liveness.rows_of(v) for v in node.outputs if v in liveness.demands]
    if not found or any(r is None for r in rows):
        return None
    layouts = {r.layout for r in rows if r is not None}
    if len(layouts) != 1:
        return None
    sets = {r.rows for r in rows if r is not None}
    if len(sets) == 1:
        return layouts.pop(), sets.pop()
    total: RowSet = frozenset()
    for one in sorted(sets, key=text_of):
        total = union(total, one)
    return layouts.pop(), total
