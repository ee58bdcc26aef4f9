"""Rows that nothing depends on are not computed: padding, rows without a label, tokens that no one reads.

``passages``: how rows pass through operators, by ``passage_rules``. ``attention``: attention and its masks,
found in the graph. ``sets``: what says that a row is needed, and its evaluation. ``demand``: which rows of every value
are needed. ``choice``: for which sets it is worth it. ``packing``: the graph over those rows. ``inspection``: the graph
that evaluates them first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.rows import passage_rules  # noqa: F401  (fills the table of passages)
from onnxtrain.optimize.rows.attention import early_values
from onnxtrain.optimize.rows.choice import chosen_sets
from onnxtrain.optimize.rows.demand import Liveness, Rows, Whole
from onnxtrain.optimize.rows.inspection import COUNTS, Inspection, inspection
from onnxtrain.optimize.rows.packing import Packed, Within, pack
from onnxtrain.optimize.rows.sets import RowSet, Sizes, is_by_attention, labels_of, text_of


def waiting_outputs(
    graph: ForwardGraph, differentiable: Collection[str], shown: Mapping[str, bool], deferrable: Collection[str]
) -> frozenset[str]:
    """The outputs that are worth waiting until they are read.

    Args:
        graph: the forward pass.
        differentiable: names of the inputs that receive a gradient.
        shown: outputs that are computed, with whether rows that no token attends to must be what eager computes.
        deferrable: outputs that may wait. One that is computed in full for another's sake does not, and none does where
            that would save no expensive work.
    """
    free: dict[str, bool] = {}
    while True:
        liveness = Liveness(graph, differentiable, {**shown, **free})
        found = {str(v.name) for v in graph.model.graph.outputs if v in liveness.early or _whole(liveness, v)}
        more = {n: True for n in deferrable if n in found and n not in free}
        if not more:
            break
        free |= more
    waiting = frozenset(n for n in deferrable if n not in free)
    every = {**shown, **dict.fromkeys(deferrable, True)}
    return waiting if waiting and _work(liveness) != _work(Liveness(graph, differentiable, every)) else frozenset()


def with_outputs(graph: ForwardGraph, names: Collection[str]) -> ForwardGraph:
    """A copy of a forward pass that has only some of its outputs, and what they need."""
    model = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version)
    updates = set(graph.signature.buffer_updates.values())
    kept = [v for v in model.graph.outputs if v.name in names or v.name in updates]
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    remove_unread(model.graph)
    chosen = tuple(n for n in graph.signature.outputs if n in names)
    return ForwardGraph(model, dataclasses.replace(graph.signature, outputs=chosen), graph.layers)


def _whole(liveness: Liveness, value: ir.Value) -> bool:
    return isinstance(liveness.demands.get(value), Whole)


def _work(liveness: Liveness) -> list[RowSet | None]:
    """The rows that each expensive node computes; None for all."""
    nodes = (n for n in liveness.graph.model.graph if Trait.EXPENSIVE in traits_of(n))
    needed = [liveness.demands[n.outputs[0]] for n in nodes if n.outputs[0] in liveness.demands]
    return [d.rows if isinstance(d, Rows) else None for d in needed]


__all__ = [
    "COUNTS",
    "Inspection",
    "Liveness",
    "Packed",
    "RowSet",
    "Rows",
    "Sizes",
    "Whole",
    "Within",
    "chosen_sets",
    "early_values",
    "inspection",
    "labels_of",
    "is_by_attention",
    "pack",
    "text_of",
    "waiting_outputs",
    "with_outputs",
]
