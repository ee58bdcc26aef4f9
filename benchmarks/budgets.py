"""Whether budgets hold: ``python -m benchmarks.budgets``.

For each run of the preset ``memory``: a step without a budget, then steps within budgets that fall evenly from its peak
to the least that there is. Of each the real peak, what was told before the step, and whether all gradients are, bit by
bit, those without a budget. Real peaks may not rise where a budget falls.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.workloads import PRESETS, WORKLOADS, Run, batches
from onnxtrain import Options, ORTModule
from onnxtrain.errors import BudgetError
from onnxtrain.execute.torch.allocations import peak_of

_MIB = 2**20
_LEFT = 1000  # a budget leaves this part of itself for what nothing tells, but where only all of it fits
_NEAR = 0.01  # how far what is told may be from a real peak


@dataclasses.dataclass
class Step:
    """One step within a budget.

    Args:
        budget: bytes; None where there is none.
        told: the peak that was told before it.
        peak: the real one.
        gradients: of all parameters.
    """

    budget: int | None
    told: int
    peak: int
    gradients: dict[str, torch.Tensor]


@dataclasses.dataclass
class Outcome:
    """What came of the budgets of one run.

    Args:
        free: the step without a budget.
        steps: those within budgets, the largest first.
        faults: what does not hold.
    """

    free: Step
    steps: list[Step]
    faults: list[str]

    @property
    def off(self) -> float:
        """The largest difference of what was told to what was, as a share."""
        return max(abs(s.told - s.peak) / s.peak for s in (self.free, *self.steps))


def measured(run: Run, count: int, cache: str) -> Outcome:
    """Train one step of a run without a budget, and within each of ``count``."""
    workload = WORKLOADS[run.workload]
    torch.manual_seed(0)
    model = workload.build(run.size).train()
    batch = batches(workload, run.size, 1, 0, grouped=False)[0]
    free = _step(model, batch, None, cache)
    least = _step(model, batch, "min", cache)
    shares = [i / (count - 1) for i in range(count)]
    smallest = least.told + least.told // _LEFT
    budgets = [round(free.peak + share * (smallest - free.peak)) for share in shares]
    steps = [s for s in (_step(model, batch, budget, cache) for budget in budgets) if s is not None]
    return Outcome(free, steps, [*_faults(free, steps), *_refused(budgets, steps)])


def _step(model: torch.nn.Module, batch: dict[str, torch.Tensor], budget: int | str | None, cache: str) -> Any:
    """One step of a copy of a model; None where no plan keeps the budget."""
    options = Options(memory_budget=budget, cache_dir=cache, summary=False)
    wrapped = ORTModule(copy.deepcopy(model), options=options)
    try:
        told = wrapped.memory_report(**batch).peak
    except BudgetError:
        return None
    wrapped(**batch).loss.backward()  # what is made once is made
    wrapped.zero_grad()
    torch.manual_seed(1)
    peak = peak_of(lambda: wrapped(**batch).loss.backward())
    gradients = {n: p.grad.clone() for n, p in wrapped.named_parameters() if p.grad is not None}
    return Step(budget if isinstance(budget, int) else None, told, peak, gradients)


def _faults(free: Step, steps: Sequence[Step]) -> Iterator[str]:
    least = free.peak
    for step in steps:
        assert step.budget is not None, "these steps have one"
        name = f"{step.budget / _MIB:.1f} MiB"
        if step.peak > step.budget:
            yield f"{name} is exceeded: {step.peak / _MIB:.2f}"
        if step.peak > least:
            yield f"{name} needs more than a larger budget: {step.peak / _MIB:.2f}, not {least / _MIB:.2f}"
        if abs(step.told - step.peak) > _NEAR * step.peak:
            yield f"{name}: told are {step.told / _MIB:.2f}, and it is {step.peak / _MIB:.2f}"
        other = [n for n, g in step.gradients.items() if not torch.equal(g, free.gradients[n])]
        if other or step.gradients.keys() != free.gradients.keys():
            yield f"{name}: other gradients of {', '.join(other)}"
        least = min(least, step.peak)


def _refused(budgets: Sequence[int], steps: Sequence[Step]) -> Iterator[str]:
    kept = {step.budget for step in steps}
    yield from (
        f"{budget / _MIB:.1f} MiB is refused, and less is said to do" for budget in budgets if budget not in kept
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all runs, or those that are named; 0 where every budget holds."""
    known = PRESETS["memory"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{', '.join(known)}; default: all")
    parser.add_argument("--count", type=int, default=20, help="budgets of each run")
    options = parser.parse_args(arguments)
    if unknown := set(options.runs) - set(known):
        parser.error(f"unknown runs {', '.join(sorted(unknown))}")
    logging.set_verbosity_error()
    console, faults = Console(), []
    table = Table("", "MiB without", "least", "budgets kept", "told, at most off", title="one step within each budget")
    with tempfile.TemporaryDirectory() as cache:
        for name in options.runs or known:
            with console.status(name):
                found = measured(known[name], options.count, cache)
            peaks = [step.peak / _MIB for step in found.steps]
            kept = f"{sum(s.peak <= (s.budget or 0) for s in found.steps)} of {options.count}"
            table.add_row(name, f"{found.free.peak / _MIB:.1f}", f"{min(peaks):.1f}", kept, f"{100 * found.off:.2f} %")
            faults += [f"{name}: {fault}" for fault in found.faults]
    console.print(table)
    for fault in faults:
        console.print(f"[red]{fault}[/red]")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
