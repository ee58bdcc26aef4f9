"""What was skipped, as text: densities of a step, its share of eager's operations, and why a value has all its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from onnxtrain.engine.bound import BoundGraph, Chosen
from onnxtrain.engine.rows import Batch, RowPlan
from onnxtrain.engine.work import share_of
from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import size_of
from onnxtrain.ir.graphs import DOMAIN, source_of
from onnxtrain.optimize.rows import Liveness, Rows, RowSet, Whole, Within, is_by_attention, labels_of, text_of

_SHOWN = 6  # names that the summary lists
_COLUMNS = (
    "STEP",
    "INPUT TYPE",
    "INPUT NAME",
    "PAD IDX",
    "DENSITY",
    "VALID TOKENS",
    "TOTAL TOKENS",
    "VALID TOKENS/BATCH",
)


def features(bound: BoundGraph) -> list[tuple[str, str]]:
    """The rows of the first summary: what is skipped of the first batch, and what could be."""
    options = bound.options
    if not options.compute_optimizer:
        return [("compute optimizer", "off (compute_optimizer, ORTMODULE_ENABLE_COMPUTE_OPTIMIZER)")]
    rows = [("compute optimizer", "on")]
    if (work := latest_work(bound)) is not None:
        ours, eager = work
        rows.append(("  FLOPs of a step", f"{_short(ours)}, {share_of(ours, eager)} {_short(eager)}"))
    moved = next((r.note for r in bound.report.passes if r.name == "ComputeOrder" and r.note), "nothing to move")
    rows.append(("  compute order", moved))
    if not options.sparse_optimizer:
        return [*rows, ("  label sparsity", "off (sparse_optimizer, ORTMODULE_ENABLE_SPARSE_OPTIMIZER)")]
    if bound.latest_choice is None:
        return rows
    chosen, plan = bound.latest_choice
    rows += [("  label sparsity", _state(plan, chosen.batch, by_attention=False))]
    if options.padding_elimination:
        rows += [("  padding elimination", _state(plan, chosen.batch, by_attention=True))]
    else:
        rows += [
            ("  padding elimination", "off (embedding_sparse_optimizer, ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER)")
        ]
    if plan.waiting:
        names = [bound.place_of(name) for name in bound.signature.outputs if name in plan.waiting]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        rows += [("  computed when read", ", ".join(names[:_SHOWN]) + more)]
    return rows


def latest_work(bound: BoundGraph) -> tuple[int, int] | None:
    """The floating point operations of the latest training step, and those of eager PyTorch.

    None where there was no such step, or content decides on sizes.
    """
    return None if bound.latest_step is None else bound.work(*bound.latest_step)


def _state(plan: RowPlan, batch: Batch, *, by_attention: bool) -> str:
    chosen = [s for s in plan.sets if is_by_attention(s) == by_attention]
    if not chosen:
        return "nothing to skip (model.explain('sparsity') says why)"
    if batch.blind:
        return "not for this batch: a row that is needed attends to nothing"
    if not batch.held:
        return "not for batches of this size: it would take longer than what it saves"
    parts = []
    for rows in chosen:
        is_packed = rows in batch.active or any(Within(rows, outer) in batch.held for outer in batch.active)
        state = "on" if is_packed else "off"
        count = plan.packed(batch.active).nodes.get(rows, 0)
        nodes = f", {count} nodes" if count else ""
        parts.append(f"{state} at density {batch.densities[rows]:.1%}{nodes} ({text_of(rows)})")
    return "; ".join(parts)


def _short(count: float) -> str:
    for unit in ("", " K", " M", " G", " T"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} P"


def step_line(chosen: Chosen, work: tuple[int, int] | None) -> str:
    """One line for a step: its rows, and the operations executed beside those of eager."""
    parts = ["the content of inputs decides on FLOPs"]
    if work is not None:
        ours, eager = work
        parts = [f"FLOPs executed / FLOPs of eager = {ours / max(1, eager):.3f} ({_short(ours)} / {_short(eager)})"]
    for rows, density in chosen.batch.densities.items():
        state = "" if rows in chosen.batch.active else ", not packed"
        parts.append(f"{density:.1%} of rows ({text_of(rows)}){state}")
    return "; ".join(parts)


def density_table(step: int, plan: RowPlan, batch: Batch, sizes: Mapping[str, int]) -> str:
    """The densities of one step, a line for each set of rows."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for rows in plan.sets:
        labels = labels_of(rows)
        attended = is_by_attention(rows)
        kind, name = ("EMBED", _ids(plan)) if attended else ("LABEL", labels[0].name if labels else text_of(rows))
        index = _padding(plan) if attended else (str(labels[0].ignored) if labels else "-")
        held, total = batch.held[rows], batch.sizes[rows]
        lengths = _lengths(plan.liveness, rows, held, sizes)
        share = f"{100 * batch.densities[rows]:.1f}%"
        lines.append((str(step), kind, name, index, share, str(len(held)), str(total), lengths))
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _lengths(liveness: Liveness, rows: RowSet, held: torch.Tensor, sizes: Mapping[str, int]) -> str:
    """How many rows each sequence has."""
    for value in liveness.demands:
        needed = liveness.rows_of(value)
        if needed is not None and needed.rows == rows and len(needed.layout) == 2:
            batch, tokens = (size_of(shapes.known_dims(value)[a], sizes) for a in needed.layout)
            counts = torch.bincount(held // max(1, tokens), minlength=batch)
            return str(counts.tolist())
    return "-"


def _embedding(plan: RowPlan) -> tuple[str, int] | None:
    """The input of ids, and the index of padding, of the first table that has one."""
    users, found = set(plan.graph.signature.user_inputs), None
    for node in plan.graph.model.graph:
        if node.domain == DOMAIN and node.op_type == "Embedding" and node.inputs[1] is not None:
            name, index = plan.liveness.source(node.inputs[1]), shapes.attribute(node, "padding_idx", -1)
            if name in users and (found is None or (found[1] < 0 <= index)):
                found = (name, index)
    return found


def _ids(plan: RowPlan) -> str:
    found = _embedding(plan)
    return found[0] if found is not None else "tokens"


def _padding(plan: RowPlan) -> str:
    found = _embedding(plan)
    return str(found[1]) if found is not None and found[1] >= 0 else "-"


@dataclasses.dataclass(frozen=True)
class RowsOfSet:
    """A set of rows that a graph could compute alone.

    Args:
        text: which rows.
        held: how many it had in the last step; None where they were not counted.
        total: how many there were in all; None too.
        state: what was done with them; empty where nothing was dropped.
    """

    text: str
    held: int | None
    total: int | None
    state: str

    def __str__(self) -> str:
        return f"{self.text}: " + (
            "" if self.held is None else f"{self.held} of {self.total} rows in the last step, {self.state}"
        )


@dataclasses.dataclass(frozen=True)
class RowsOfNode:
    """Which rows of a node's first value are needed.

    Args:
        value: its name.
        operator: the node's.
        needed: which set, or why all of them.
        source: line of the user's; empty where none is known.
    """

    value: str
    operator: str
    needed: str
    source: str

    def __str__(self) -> str:
        return f"{self.value} = {self.operator}: {self.needed}" + (f"  # {self.source}" if self.source else "")


def explain_rows(bound: BoundGraph) -> Iterator[str]:
    """Each set of rows with its density in the last step, and for every node which rows of it are needed, and why."""
    found = rows_of(bound)
    yield from found.told
    yield from (f"set {number}: {each}" for number, each in enumerate(found.sets, 1))
    yield from found.outputs
    yield from (f"  {node}" for node in found.nodes)


@dataclasses.dataclass(frozen=True)
class RowsOfGraph:
    """Which rows a graph computes, and why.

    Args:
        told: why none is left out.
        sets: of rows.
        outputs: what becomes of outputs that are not computed as eager does.
        nodes: of the graph, in order.
    """

    told: Sequence[str]
    sets: Sequence[RowsOfSet] = ()
    outputs: Sequence[str] = ()
    nodes: Sequence[RowsOfNode] = ()


def rows_of(bound: BoundGraph) -> RowsOfGraph:
    """Which rows a graph computed in its last step that could drop some, and why."""
    if bound.latest_choice is None:
        return RowsOfGraph(["no row could be dropped yet: the module was not trained, or the options forbid it"])
    chosen, plan = bound.latest_choice
    plan = plan.of(bound.graph) if plan.graph.layers else plan
    told = []
    if plan.sets and not chosen.batch.held:
        told.append("all rows of the last batch were computed: it is too small for the rest to pay")
    if chosen.batch.blind:
        told.append("all rows of the last batch were computed: a row that is needed attends to nothing")
    outputs = [f"output {bound.place_of(name)}: computed when it is read" for name in sorted(plan.waiting)]
    for name, rows in chosen.zeros.items():
        beside = f"zeros beside rows where {text_of(rows)} (strict=True computes them)"
        outputs.append(f"output {bound.place_of(name)}: {beside}")
    return RowsOfGraph(told, [*_sets(plan, chosen.batch)], outputs, [*_nodes(plan)])


def _sets(plan: RowPlan, batch: Batch) -> Iterator[RowsOfSet]:
    for rows in plan.sets:
        outer = next((n for n, s in enumerate(plan.sets, 1) if s in batch.active and Within(rows, s) in batch.held), 0)
        state = "only these are computed" if rows in batch.active else "all are computed"
        if outer and rows not in batch.active:
            state = f"computed with those of set {outer}"
        counts = (len(batch.held[rows]), batch.sizes[rows], state) if batch.held else (None, None, "")
        yield RowsOfSet(text_of(rows), *counts)


def _nodes(plan: RowPlan) -> Iterator[RowsOfNode]:
    numbers = {rows: number for number, rows in enumerate(plan.sets, 1)}
    for node in plan.graph.model.graph:
        value = next((v for v in node.outputs if v in plan.liveness.demands), None)
        if value is None:
            continue
        needed = plan.liveness.demands[value]
        if isinstance(needed, Rows):
            number = numbers.get(needed.rows)
            text = f"set {number}" if number is not None else text_of(needed.rows)
        else:
            assert isinstance(needed, Whole)
            text = f"all rows: {needed.reason}"
        yield RowsOfNode(str(value.name), node.op_type, text, source_of(node))
