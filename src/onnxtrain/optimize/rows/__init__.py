"""Rows that nothing depends on are not computed: padding, rows without a label, tokens that no one reads.

``passages``: how rows pass through operators. ``attention``: attention and its masks, found in the graph. ``sets``:
what says that a row is needed, and its evaluation. ``demand``: which rows of every value are needed. ``packing``: the
graph over those rows. ``inspection``: the graph that evaluates them first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize.rows.demand import Liveness, Rows, Whole
from onnxtrain.optimize.rows.inspection import BLIND, Inspection, inspection
from onnxtrain.optimize.rows.packing import Packed, Within, chosen_sets, pack
from onnxtrain.optimize.rows.sets import RowSet, is_by_attention, labels_of, text_of


def row_liveness(
    graph: ForwardGraph, differentiable: Collection[str], shown: Mapping[str, bool], deferrable: Collection[str]
) -> tuple[Liveness, frozenset[str]]:
    """Which rows are needed, and which outputs are computed only when they are read.

    Args:
        graph: the forward pass.
        differentiable: names of the inputs that receive a gradient.
        shown: outputs that are computed, with whether rows that no token attends to must be what eager computes.
        deferrable: outputs that may wait until they are read. One that is computed in full for another's sake does
            not wait.

    Returns:
        The analysis, and the outputs that wait.
    """
    free: dict[str, bool] = {}
    while True:
        liveness = Liveness(graph, differentiable, {**shown, **free})
        found = {str(v.name) for v in graph.model.graph.outputs if v in liveness.early or _whole(liveness, v)}
        more = {n: True for n in deferrable if n in found and n not in free}
        if not more:
            waiting = frozenset(n for n in deferrable if n not in free)
            return liveness, waiting
        free |= more


def _whole(liveness: Liveness, value: object) -> bool:
    return isinstance(liveness.demands.get(value), Whole)  # type: ignore[arg-type]


__all__ = [
    "BLIND",
    "Inspection",
    "Liveness",
    "Packed",
    "RowSet",
    "Rows",
    "Whole",
    "Within",
    "chosen_sets",
    "inspection",
    "labels_of",
    "is_by_attention",
    "pack",
    "row_liveness",
    "text_of",
]
