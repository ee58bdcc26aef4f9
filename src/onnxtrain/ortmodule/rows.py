"""Which rows of a batch are computed: inspected at every step, and the graph chosen that skips the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize.rows import (
    BLIND,
    Packed,
    RowSet,
    Within,
    chosen_sets,
    inspection,
    is_by_attention,
    pack,
    row_liveness,
)
from onnxtrain.options import Options

DENSE: frozenset[RowSet] = frozenset()


@dataclasses.dataclass(frozen=True)
class Batch:
    """What was found of one batch.

    Args:
        active: the sets whose rows alone are computed.
        held: the rows of each set, and their places within others.
        densities: for each set, the share of its rows among all.
        sizes: how many rows there are in all, for each set.
        blind: whether a row that is needed attends to nothing that is not hidden, so that nothing may be dropped.
    """

    active: frozenset[RowSet]
    held: Mapping[RowSet | Within, torch.Tensor]
    densities: Mapping[RowSet, float]
    sizes: Mapping[RowSet, int]
    blind: bool = False


NOTHING = Batch(DENSE, {}, {}, {})


class RowPlan:
    """The rows that matter to some outputs of a graph.

    Args:
        graph: the forward pass.
        differentiable: names of the inputs that receive a gradient.
        shown: outputs that are computed, with whether rows that no token attends to must be what eager computes.
        deferrable: outputs that may wait until they are read.
        options: which rows may be dropped.

    Attributes:
        waiting: the outputs that are computed when they are read.
        sets: the sets of rows that something is computed for.
    """

    def __init__(
        self,
        graph: ForwardGraph,
        differentiable: Collection[str],
        shown: Mapping[str, bool],
        deferrable: Collection[str],
        options: Options,
    ) -> None:
        self.graph, self.options = graph, options
        self.liveness, self.waiting = row_liveness(graph, differentiable, shown, deferrable)
        self.sets = [s for s in chosen_sets(self.liveness) if options.padding_elimination or not is_by_attention(s)]
        self.inspection = inspection(self.liveness, self.sets) if self.sets else None
        self.outputs = tuple(n for n in graph.signature.outputs if n not in self.waiting)
        self._packed: dict[frozenset[RowSet], Packed] = {}

    def packed(self, active: frozenset[RowSet]) -> Packed:
        """The graph that computes these sets' rows, and the outputs that do not wait."""
        if active not in self._packed:
            self._packed[active] = pack(self.liveness, active, self.outputs)
        return self._packed[active]

    def changes_nothing(self, active: frozenset[RowSet]) -> bool:
        """Whether the packed graph is the graph itself."""
        return not active and not self.waiting

    def batch(self, found: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Batch:
        """What the inspection's results say.

        Args:
            found: the results, in order.
            inputs: the call's inputs by name, for sizes.
        """
        assert self.inspection is not None
        held = dict(zip(self.inspection.holds, found, strict=False))
        blind = bool(found[-1])
        sizes = symbol_sizes(self.graph, inputs)
        totals = {s: size_of(dim, sizes) for s, dim in self.inspection.totals.items()}
        densities = {s: len(held[s]) / max(1, totals[s]) for s in self.sets}
        limit = self.options.density_threshold
        active = frozenset(s for s, d in densities.items() if 0.0 < d < limit) if not blind else DENSE
        return Batch(active, held, densities, totals, blind)


def symbol_sizes(graph: ForwardGraph, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of a call by the names that the graph has for them."""
    found: dict[str, int] = {}
    for value in graph.model.graph.inputs:
        tensor = inputs.get(str(value.name))
        if tensor is not None:
            dims = shapes.dims_of(value) or ()
            found |= {str(d.value): n for d, n in zip(dims, tensor.shape, strict=True) if not isinstance(d, int)}
    return found


def size_of(dim: shapes.Dim, sizes: Mapping[str, int]) -> int:
    """A dimension of a call."""
    if isinstance(dim, int):
        return dim
    return int(dim.evaluate(dict(sizes)))  # type: ignore[arg-type]


def rows_in_order(packed: Packed, batch: Batch) -> list[Any]:
    """The inputs of a packed graph that say which rows, in its order."""
    return [batch.held[held] for held in packed.inputs.values()]


__all__ = ["BLIND", "DENSE", "NOTHING", "Batch", "RowPlan", "rows_in_order", "size_of", "symbol_sizes"]
