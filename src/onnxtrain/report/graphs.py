"""What is told of one graph: how it was made, what it computes, and which rows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.sparsity import RowsOfGraph, latest_work, rows_of
from onnxtrain.engine.summary import phases_of
from onnxtrain.ir.graphs import is_backward, source_of
from onnxtrain.ir.modules import Module, modules_of
from onnxtrain.ir.passes import Record
from onnxtrain.ir.printer import type_text


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator of a graph.

    Args:
        value: name of its first value.
        operator: its name.
        type: element type and sizes of that value: ``f32[batch,64]``.
        source: line of the user's that it comes from, ``file.py:12``; empty where none is known.
        reads: names of the parameters and buffers that it reads.
        modules: names and classes of the modules that it comes from, the outermost first, but for the captured one.
    """

    value: str
    operator: str
    type: str
    source: str
    reads: tuple[str, ...]
    modules: tuple[Module, ...] = ()


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """What is told of one graph.

    Args:
        number: its number, from 1, in the order of capture.
        mode: ``"training"`` or ``"inference"``.
        reasons: why it was captured.
        served: how many calls.
        told: further lines: sizes of its inputs, paths, what was compiled.
        phases: seconds of each stage of its making.
        passes: what each pass did; those that ran several times in order of their first.
        operators: of the captured forward pass, in order.
        nodes: how many the forward and the backward pass of the latest variant have.
        saved: how many values are saved between them.
        rows: which rows it computes.
        work: floating point operations of the latest step that trained, and those of eager PyTorch; None where there
            was none, or content decides on sizes.
    """

    number: int
    mode: str
    reasons: Sequence[str]
    served: int
    told: Sequence[str]
    phases: dict[str, float]
    passes: Sequence[Record]
    operators: Sequence[Operator]
    nodes: tuple[int, int]
    saved: int
    rows: RowsOfGraph
    work: tuple[int, int] | None

    @property
    def seconds(self) -> float:
        """Of its making."""
        return sum(self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        """All of it, in types that JSON has."""
        return {**dataclasses.asdict(self), "nodes": dict(zip(("forward", "backward"), self.nodes, strict=True))}


def graph_report(
    bound: BoundGraph, number: int, mode: str, reasons: Sequence[str], served: int, told: Sequence[str]
) -> GraphReport:
    """What is told of a graph.

    Args:
        bound: the graph.
        number: its number, from 1.
        mode: ``"training"`` or ``"inference"``.
        reasons: why it was captured.
        served: how many calls.
        told: further lines on it.
    """
    plan = bound.latest.plan
    owned = {*bound.signature.parameters, *bound.signature.buffers}
    return GraphReport(
        number=number,
        mode=mode,
        reasons=reasons,
        served=served,
        told=told,
        phases=phases_of(bound),
        passes=[*_together(bound.report.passes)],
        operators=[_operator(node, owned) for node in bound.graph.model.graph if not is_backward(node)],
        nodes=(len(plan.forward.graph), 0 if plan.backward is None else len(plan.backward.graph)),
        saved=len(plan.saved),
        rows=rows_of(bound),
        work=latest_work(bound),
    )


def _operator(node: ir.Node, owned: set[str]) -> Operator:
    reads = tuple(str(value.name) for value in node.inputs if value is not None and value.name in owned)
    value = node.outputs[0]
    return Operator(str(value.name), node.op_type, type_text(value), source_of(node), reads, modules_of(node))


def _together(records: Sequence[Record]) -> Iterator[Record]:
    """One record for each pass, of all its runs."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.name, []).append(record)
    for name, found in runs.items():
        seconds, notes = sum(r.seconds for r in found), dict.fromkeys(r.note for r in found if r.note)
        before, after = sum(r.nodes_before for r in found), sum(r.nodes_after for r in found)
        yield Record(name, seconds, before, after, any(r.modified for r in found), "; ".join(notes))
