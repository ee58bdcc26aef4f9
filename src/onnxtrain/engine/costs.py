"""What each line of a step cost, and what it costs at least."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import onnx_ir as ir
import torch

from onnxtrain.compiler import Compiled
from onnxtrain.errors import GraphError, ShapeError
from onnxtrain.execute import Timing
from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir.modules import Module, modules_of
from onnxtrain.plan.cost import flops, node_flops
from onnxtrain.plan.formulas import MOVES, PRODUCTS


class CanDo(Protocol):
    """What a machine can do, as ``Speeds`` measures it."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that its memory moves."""
        ...

    def of_products(self, dtype: torch.dtype) -> float:
        """Operations a second in products."""
        ...


@dataclasses.dataclass(frozen=True)
class Cost:
    """What operators cost in a step.

    Args:
        part: ``"forward"`` or ``"backward"``.
        line: of the program.
        operator: its name.
        seconds: that it took, the median of some runs.
        calls: how often it ran.
        flops: floating point operations, of products alone; a multiply-add is two.
        moved: bytes that it read and wrote.
        least: seconds that the machine needs for these operations or bytes, by whichever takes longer.
        modules: names and classes of the modules that they come from, the outermost first, but for the captured one.
    """

    part: str
    line: str
    operator: str
    seconds: float
    calls: int
    flops: int
    moved: int
    least: float
    modules: tuple[Module, ...] = ()


def costs_of(
    compiled: Compiled, timings: Sequence[Sequence[Timing]], sizes: Mapping[str, int], speeds: CanDo
) -> list[Cost]:
    """What each line of a step cost.

    Args:
        compiled: the step.
        timings: of some runs.
        sizes: of named dimensions.
        speeds: what the machine can do.
    """
    nodes = _nodes_of(compiled)
    counted: dict[str, int] = {}
    found = []
    for seen in _by_line(timings):
        first, node = seen[0], nodes.get((seen[0].part, seen[0].value))
        moved = moved_by(first.operator, first.read, first.written)
        count = 0 if node is None else operations(node, sizes, counted)
        least = least_of(node, moved, count, speeds)
        seconds = statistics.median(timing.seconds for timing in seen)
        modules = () if node is None else modules_of(node)
        found.append(Cost(first.part, first.line, first.operator, seconds, first.calls, count, moved, least, modules))
    return found


def _by_line(timings: Sequence[Sequence[Timing]]) -> Iterable[Sequence[Timing]]:
    """For each line what it took in the runs in which it ran: a branch need not run in all."""
    found: dict[tuple[str, str], list[Timing]] = {}
    for timing in itertools.chain.from_iterable(timings):
        found.setdefault((timing.part, timing.line), []).append(timing)
    return found.values()


def _nodes_of(compiled: Compiled) -> dict[tuple[str, str], ir.Node]:
    """The nodes of the plan by part and name of their first value."""
    plan = compiled.plan
    parts = {"forward": plan.forward, "backward": plan.backward}
    return {
        (part, str(node.outputs[0].name)): node
        for part, model in parts.items()
        if model is not None
        for node in model.graph
        if node.outputs
    }


def moved_by(operator: str, read: int, written: int) -> int:
    """Bytes that an operator reads and writes; one that moves elements reads no more of its operands than it writes."""
    return (min(read, written) if operator in MOVES else read) + written


def least_of(node: ir.Node | None, moved: int, count: int, speeds: CanDo) -> float:
    """Seconds that a machine needs for an operator at best.

    Args:
        node: the operator; None where it is not known.
        moved: bytes that it reads and writes.
        count: its operations, 0 where it is no product.
        speeds: what the machine can do.
    """
    least = moved / speeds.bandwidth
    if node is None or not count:
        return least
    return max(least, count / speeds.of_products(torch_dtype(int(node.outputs[0].dtype or 0))))


def operations(node: ir.Node, sizes: Mapping[str, int], counted: dict[str, int]) -> int:
    """The operations of a product, 0 where it is none or they cannot be told.

    Args:
        node: the product.
        sizes: of named dimensions.
        counted: keeps those of one form, which are counted once.
    """
    if node.op_type not in PRODUCTS:
        return 0
    try:
        form = str(node_flops(node))
        if form not in counted:
            counted[form] = flops([node]).evaluate(sizes)
    except (GraphError, ShapeError):
        return 0
    return counted[form]
