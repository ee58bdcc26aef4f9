"""Which rows of a batch are computed: inspected at every step, and the graph chosen that skips the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import size_of
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.layer_slices import weights
from onnxtrain.ir.passes import Record
from onnxtrain.optimize import join_losses, move_selections
from onnxtrain.optimize.rows import (
    Inspection,
    Liveness,
    Packed,
    RowSet,
    Sizes,
    Within,
    chosen_sets,
    inspection,
    is_by_attention,
    pack,
    waiting_outputs,
    with_outputs,
)
from onnxtrain.options import Options
from onnxtrain.plan.cost import flops

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
    """The forward pass without the work that some outputs do not need, and the rows that matter to them.

    Args:
        graph: the forward pass; it is not changed.
        differentiable: names of the inputs that receive a gradient.
        shown: outputs that are computed, with whether rows that no token attends to must be what eager computes.
        deferrable: outputs that may wait until they are read.
        same: sizes that are known to be the same as others, with the others' names.
        options: which rows may be dropped.

    Attributes:
        waiting: the outputs that are computed when they are read.
        graph: the forward pass without them, selections moved.
        passes: what each pass did.
        sets: the sets of rows that something is computed for.
    """

    def __init__(
        self,
        graph: ForwardGraph,
        differentiable: Collection[str],
        shown: Mapping[str, bool],
        deferrable: Collection[str],
        same: Mapping[str, str],
        options: Options,
    ) -> None:
        self.options, self.same = options, same
        self._given = (differentiable, shown, deferrable, same, options)
        self.passes: list[Record] = []
        self.become(graph)

    def become(self, graph: ForwardGraph) -> None:
        """Plan the same for another graph: the whole one, where this is for a short one."""
        differentiable, shown, deferrable, same, options = self._given
        self._packed: dict[frozenset[RowSet], Packed] = {}
        if same:
            graph = with_outputs(graph, graph.signature.outputs)
            shapes.rename_symbols(graph.model.graph, same)
        self.waiting = waiting_outputs(graph, differentiable, shown, deferrable)
        self.outputs = tuple(n for n in graph.signature.outputs if n not in self.waiting)
        self.graph = with_outputs(graph, self.outputs)
        self.passes += move_selections(self.graph, check=options.verify_passes)
        kept = {name: shown.get(name, True) for name in self.outputs}
        self.liveness = Liveness(self.graph, differentiable, kept)
        found = chosen_sets(self.liveness) if options.drops_rows else []
        self.sets = [s for s in found if options.padding_elimination or not is_by_attention(s)]
        self.inspection = inspection(self.liveness, self.sets) if self.sets else None
        self._limits: dict[tuple[int, ...], dict[RowSet, float]] = {}
        inspected = self.inspection.graph.model.graph.num_nodes() if self.inspection is not None else 0
        self._costs = {s: _Cost(self.liveness, self.packed(frozenset(self.sets)), s, inspected) for s in self.sets}

    def of(self, graph: ForwardGraph) -> RowPlan:
        """The same of another graph: of the whole one, where this is of a short one."""
        return RowPlan(graph, *self._given)

    def packed(self, active: frozenset[RowSet]) -> Packed:
        """The graph that computes these sets' rows, and the outputs that do not wait."""
        if active not in self._packed:
            packed = pack(self.liveness, active)
            self.passes += join_losses(packed.graph, check=self.options.verify_passes)
            self._packed[active] = packed
        return self._packed[active]

    def rows_of_output(self, name: str) -> RowSet | None:
        """The rows that are computed of an output; None where all are."""
        value = next(v for v in self.graph.model.graph.outputs if v.name == name)
        needed = self.liveness.rows_of(value)
        return None if needed is None or needed.layout != (0, 1) else needed.rows

    def batch(self, found: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Batch:
        """What the inspection's results say.

        Args:
            found: the results, in order.
            sizes: the call's sizes by name.
        """
        assert self.inspection is not None
        *counts, blind = found[-1].tolist()  # the host waits for a device here, and nowhere else
        held = _rows(self.inspection, found[:-1], counts)
        totals, limits = self._totals(sizes), self.limits(sizes)
        densities = {s: len(held[s]) / max(1, totals[s]) for s in self.sets}
        active = frozenset(s for s, d in densities.items() if 0.0 < d < limits[s])
        active = frozenset(s for s in active if not any(_is_nearly(held, s, outer) for outer in active - {s}))
        return Batch(DENSE if blind else active, held, densities, totals, bool(blind))

    def most(self, active: frozenset[RowSet], sizes: Mapping[str, int]) -> dict[str, int]:
        """How many rows a packed graph is given at most, by the names of its sizes: of more, all are computed."""
        totals, limits, packed = self._totals(sizes), self.limits(sizes), self.packed(active)
        named = {
            str(v.name): str(shapes.known_dims(v)[0])
            for v in packed.graph.model.graph.inputs
            if v.name in packed.inputs
        }
        sets = {n: held.rows if isinstance(held, Within) else held for n, held in packed.inputs.items()}
        return {named[n]: math.ceil(totals[s] * min(1.0, limits[s])) for n, s in sets.items()}

    def _totals(self, sizes: Mapping[str, int]) -> dict[RowSet, int]:
        """How many rows there are in all, for each set."""
        assert self.inspection is not None
        return {s: size_of(dim, sizes) for s, dim in self.inspection.totals.items()}

    def limits(self, sizes: Mapping[str, int]) -> dict[RowSet, float]:
        """For each set, the share of rows above which it costs more to pack them than to compute them all."""
        if self.options.density_threshold is not None:
            return dict.fromkeys(self.sets, self.options.density_threshold)
        key = tuple(sizes.values())
        if key not in self._limits:
            if len(self._limits) >= _REMEMBERED:
                self._limits.clear()
            totals = self._totals(sizes)
            self._limits[key] = {s: self._costs[s].limit(totals[s], sizes) for s in self.sets}
        return self._limits[key]


_REMEMBERED = 4096  # sizes of batches whose limits are kept
_NEARLY = 0.95  # share of a set from which on a set within it is not worth rows of its own
_SMALLEST = 0.1  # limit below which rows are not worth being counted
_LARGEST = 0.98  # share of rows from which on nothing is worth a second graph
_MOVE = 300  # operations that take as long as moving one number in and back again, of products of a few hundred columns
_START = 300_000  # operations that one thread does while a node is started
_SEQUENCE = 3_500_000  # and while a sequence is attended by itself, forward and backward
_MOVERS = ("FlattenAndUnpad", "PadAndUnflatten", "ShrunkenGather")


def _rows(
    inspection: Inspection, found: Sequence[torch.Tensor], counts: Sequence[int]
) -> dict[RowSet | Within, torch.Tensor]:
    """The rows of each set (int64, ascending), and their places within others."""
    masks, before = found[: len(counts)], dict(zip(inspection.outer, found[len(counts) :], strict=True))
    each = zip(inspection.sets, masks, counts, strict=True)
    rows = {s: torch.nonzero_static(mask, size=count).squeeze(1) for s, mask, count in each}
    return {**rows, **{pair: before[pair.outer][rows[pair.rows]] for pair in inspection.pairs}}


def _is_nearly(held: Mapping[RowSet | Within, torch.Tensor], inner: RowSet, outer: RowSet) -> bool:
    """Whether a set is most of another that it lies in."""
    return Within(inner, outer) in held and len(held[inner]) >= _NEARLY * len(held[outer])


class _Cost:
    """What a row of a set costs to compute, and to pack.

    Args:
        liveness: which nodes compute for the set.
        packed: the graph that packs it.
        rows: the set.
        inspected: how many nodes the inspection has.
    """

    def __init__(self, liveness: Liveness, packed: Packed, rows: RowSet, inspected: int) -> None:
        inside = {n: a for a in liveness.attentions for n in a.nodes}
        nodes, graph, layers = [], packed.graph.model.graph, packed.graph.layers
        often = weights(liveness.graph.model.graph, layers), weights(graph, layers)
        for node in liveness.graph.model.graph:
            value = node.outputs[0] if node not in inside else inside[node].output
            needed = liveness.rows_of(value)
            if needed is not None and needed.rows == rows:
                nodes.append(node)
        self.computed = flops(nodes, often[0])
        self.moved = sum(_width(n, packed, rows) * often[1].get(n, 1) for n in graph if n.op_type in _MOVERS)
        self.started = inspected + packed.nodes.get(rows, 0)
        found = [(a, liveness.rows_of(a.output)) for a in liveness.attentions if a.is_plain]
        found = [(a, needed) for a, needed in found if needed is not None and needed.rows == rows]
        self.attended = [(a.space[0], often[0].get(a.nodes[-1], 1)) for a, _ in found]

    def limit(self, total: int, sizes: Mapping[str, int]) -> float:
        """The share of rows above which packing costs more than it saves; forward and backward are three forwards."""
        if not set(self.computed.symbols) <= set(sizes):
            return _LARGEST
        work = 3 * self.computed.evaluate(sizes)
        sequences = sum(size_of(batch, sizes) * often for batch, often in self.attended)
        fixed = torch.get_num_threads() * (_START * self.started + _SEQUENCE * sequences)
        limit = 1.0 - (_MOVE * self.moved * total + fixed) / work if work else 0.0
        return min(_LARGEST, limit) if limit > _SMALLEST else 0.0


def _width(node: ir.Node, packed: Packed, rows: RowSet) -> int:
    """The numbers in a row that a node moves into or out of a set; those of integers cost next to nothing."""
    names = {n for n, held in packed.inputs.items() if held == rows or (isinstance(held, Within) and held.rows == rows)}
    x, y = node.inputs[0], node.outputs[0]
    if x is None or str(node.inputs[1].name) not in names or y.dtype is None or not y.dtype.is_floating_point():  # type: ignore[union-attr]
        return 0
    rest = shapes.known_dims(x)[1:] if node.op_type == "PadAndUnflatten" else shapes.known_dims(y)[1:]
    return math.prod(d for d in rest if isinstance(d, int))


def beside(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, over its first two axes, beside some rows."""
    others = torch.ones(tensor.shape[0] * tensor.shape[1], dtype=torch.bool, device=tensor.device)
    others[rows] = False
    return tensor.flatten(0, 1)[others]


def rows_in_order(packed: Packed, batch: Batch) -> list[Any]:
    """The inputs of a packed graph that say which rows, in its order."""
    return [batch.held[held] for held in packed.inputs.values()]


def can_wait(value: ir.Value, known: Sizes) -> bool:
    """Whether an output is a tensor whose sizes are known without computing it."""
    return bool(value.shape) and all(map(known.knows, value.shape))


__all__ = ["DENSE", "NOTHING", "Batch", "RowPlan", "rows_in_order"]
