"""What memory a step needs, told before it runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.budget import Fit, needed
from onnxtrain.engine.memory_page import page
from onnxtrain.engine.pages import Paged
from onnxtrain.execute import Footprint
from onnxtrain.ir.graphs import source_of
from onnxtrain.ir.printer import in_bytes
from onnxtrain.plan.recompute import Choice

_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 72  # of the timeline
_TOP = 8  # rows of a table
_NAMED = 5  # operators that a row names


@dataclasses.dataclass(frozen=True)
class MemoryReport(Paged):
    """The memory of a training step, as the backend allocates it; nothing was run.

    ``str()`` of it is a text, ``save`` writes a page with a picture. All sizes are bytes.

    Args:
        footprint: what the step has in use beside weights and inputs, line by line.
        before: the same where nothing is computed again.
        weights: parameters and buffers.
        inputs: of the call.
        gradients: of the parameters, all of which are there at the end; part of the footprint.
        chosen: what is computed again to keep the budget, or waits elsewhere.
        budget: the budget as stated; None where there is none.
        sizes: the sizes of named dimensions that it is told for.
        largest: how many rows a batch may have within the budget; None without one, or where it has no such size.
    """

    footprint: Footprint
    before: Footprint
    weights: int
    inputs: int
    gradients: int
    chosen: Sequence[Choice] = ()
    budget: int | float | str | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    largest: int | None = None

    @property
    def peak(self) -> int:
        """Most bytes in use at once beside weights and inputs."""
        return self.footprint.peak

    def __str__(self) -> str:
        top = max(self.footprint.uses, key=lambda use: use.most)
        rows = [
            f"a step needs {in_bytes(self.peak)} beside {in_bytes(self.weights)} of weights and "
            f"{in_bytes(self.inputs)} of inputs, for {', '.join(f'{n} = {s}' for n, s in self.sizes.items())}",
            f"  {'between forward and backward':<30}{in_bytes(self.footprint.saved)}",
            f"  {'gradients of parameters':<30}{in_bytes(self.gradients)}",
            f"  {'the peak':<30}in the {top.part} pass: {label(top.line)}",
            *self._budget(),
            "",
            self._timeline(),
            "",
            "what is in use at the peak",
            *_table(self.footprint.holders),
        ]
        if again := [(_operators(c), c.gain) for c in self.chosen if c.moved is None]:
            rows += ["", "what is computed again, and what that saves", *_table(again)]
        if away := [(_maker(c.moved), c.gain) for c in self.chosen if c.moved is not None]:
            rows += ["", "what waits elsewhere for the backward pass", *_table(away)]
        return "\n".join(rows)

    def page(self) -> str:
        """The page in HTML."""
        return page(str(self), self.footprint, self.before)

    def as_dict(self) -> dict[str, Any]:
        """All that is told, in types that JSON has; lines of the program are told as a person reads them."""
        return {
            "peak": self.peak,
            "without_budget": self.before.peak,
            "saved": self.footprint.saved,
            "weights": self.weights,
            "inputs": self.inputs,
            "gradients": self.gradients,
            "budget": self.budget,
            "largest_batch": self.largest,
            "sizes": dict(self.sizes),
            "timeline": [
                {"part": u.part, "line": label(u.line), "most": u.most, "rest": u.rest} for u in self.footprint.uses
            ],
            "at_the_peak": [{"line": label(line), "bytes": size} for line, size in self.footprint.holders],
            "computed_again": [
                {"operators": [n.op_type for n in c.nodes], "values": list(c.dropped), "bytes": c.gain}
                for c in self.chosen
                if c.moved is None
            ],
            "elsewhere": [{"values": list(c.dropped), "bytes": c.gain} for c in self.chosen if c.moved is not None],
        }

    def _budget(self) -> list[str]:
        if self.budget is None:
            return []
        stated = in_bytes(self.budget) if isinstance(self.budget, int) else str(self.budget)
        spared = f"{in_bytes(self.before.peak)} without it" if self.chosen else "all that is saved has room"
        rows = [f"  {'the budget':<30}{stated}: {spared}"]
        if self.largest is not None:
            rows.append(f"  {'the largest batch':<30}{self.largest} rows, as this one is planned")
        return rows

    def _timeline(self) -> str:
        """The bytes in use as bars, forward before backward."""
        parts = [[u.most for u in self.footprint.uses if u.part == part] for part in ("forward", "backward")]
        count = sum(map(len, parts))
        drawn = [_bars(p, max(1, round(_COLUMNS * len(p) / count)), self.peak) for p in parts if p]
        return "  " + " | ".join(drawn) + f"\n  forward{' | backward' if len(drawn) > 1 else ''}"


@dataclasses.dataclass(frozen=True)
class Planned:
    """A step as it is planned for a batch.

    Args:
        fit: the graph without a budget, and as it fits.
        inputs: of the graph that fits, by name.
        sizes: the sizes of named dimensions that it is planned for.
        trained: names of the parameters that receive a gradient.
        work: floating point operations of the step, and those of eager PyTorch; None where content decides on sizes, or
            nothing is trained.
    """

    fit: Fit
    inputs: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    trained: Sequence[str]
    work: tuple[int, int] | None

    @property
    def footprint(self) -> Footprint:
        """What the step needs.

        Raises:
            BackendError: the backend cannot tell.
        """
        return needed(self.fit.compiled, self.sizes, self.inputs)


def planned(bound: BoundGraph, tensors: Sequence[torch.Tensor]) -> Planned:
    """How a step of a graph on the user's tensors is planned, which is not run.

    Raises:
        BudgetError: the step cannot be made to fit.
    """
    inputs = dict(zip(bound.signature.inputs, bound.inputs(tensors), strict=True))
    differentiable = bound.differentiable_of(inputs) if torch.is_grad_enabled() else []
    chosen, fit = bound.planned(inputs, differentiable, bound.expected.names)
    sizes = fit.sizes if bound.options.worst_case is not None else bound.sizes_of(chosen, inputs)
    owned = {*bound.signature.parameters, *bound.signature.buffers}
    work = bound.work(chosen, bound.sizes.of(inputs)) if differentiable else None
    return Planned(fit, inputs | chosen.named_rows, sizes, [name for name in differentiable if name in owned], work)


def memory_report(bound: BoundGraph, tensors: Sequence[torch.Tensor]) -> MemoryReport:
    """The memory of a step of a graph on the user's tensors, which is not run.

    Raises:
        BackendError: the backend cannot tell.
        BudgetError: the step cannot be made to fit.
    """
    plan = planned(bound, tensors)
    signature, step = bound.signature, plan.inputs
    return MemoryReport(
        footprint=plan.footprint,
        before=needed(plan.fit.base, plan.sizes, step),
        weights=sum(step[name].nbytes for name in {*signature.parameters, *signature.buffers}),
        inputs=sum(step[name].nbytes for name in signature.user_inputs),
        gradients=sum(step[name].nbytes for name in plan.trained),
        chosen=plan.fit.chosen,
        budget=bound.options.memory_budget,
        sizes=plan.sizes,
        largest=_largest(bound, plan.fit, plan.sizes, step),
    )


def _largest(bound: BoundGraph, fit: Fit, sizes: Mapping[str, int], step: Mapping[str, torch.Tensor]) -> int | None:
    """How many rows a batch may have so that a step as it is planned keeps a budget of bytes."""
    most = bound.options.memory_budget
    rows = {name: size for name, size in sizes.items() if name in bound.sizes.leading or name not in bound.sizes.names}
    batch = next((sizes[name] for name in bound.sizes.leading), 0)
    if not isinstance(most, int) or not batch or fit.footprint is None:
        return None

    def peak(count: int) -> int:
        larger = {name: -(-size * count // batch) for name, size in rows.items()}
        return needed(fit.compiled, {**sizes, **larger}, step).peak

    one, two = peak(batch), peak(2 * batch)
    count = batch + (most - one) * batch // max(two - one, 1)
    while count > batch and peak(count) > most:
        count -= max(1, count // 64)
    return max(count, 0)


def label(line: str) -> str:
    """A line of a program as a person reads it: ``Gelu, activations.py:89``."""
    found = re.search(r"ops\.(\w+)\(", line)
    source = line.rpartition("  # ")[2] if "  # " in line else ""
    return ", ".join(filter(None, (found[1].rstrip("_") if found else line, source)))


def _operators(choice: Choice) -> str:
    """What runs again; of many the first and the last."""
    names = [n.op_type for n in choice.nodes] or ["nothing: only what runs again itself would read it"]
    return ", ".join(names if len(names) <= _NAMED else [*names[:2], f"{len(names) - 4} more", *names[-2:]])


def _maker(value: ir.Value) -> str:
    """What made a value, and where."""
    node = value.producer()
    assert node is not None  # only such values are moved
    return ", ".join(filter(None, (node.op_type, source_of(node))))


def _table(rows: Iterable[tuple[str, int]]) -> list[str]:
    """Rows of the same label as one, the largest first."""
    sums, counts = Counter[str](), Counter[str]()
    for line, size in rows:
        sums[label(line)] += size
        counts[label(line)] += 1
    shown = [f"  {in_bytes(size):>10}  {counts[text]:>4} x  {text}" for text, size in sums.most_common(_TOP)]
    rest = sum(size for _, size in sums.most_common()[_TOP:])
    return [*shown, *([f"  {in_bytes(rest):>10}          the rest"] if rest else [])]


def _bars(values: Sequence[int], columns: int, most: int) -> str:
    columns = min(columns, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    tops = [max(values[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[-(-top * (len(_BARS) - 1) // max(most, 1))] for top in tops)
