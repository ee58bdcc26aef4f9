"""Steps within a stated number of bytes: what the backward pass computes again so that it keeps less."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from onnxtrain.compiler import Compiled, Report, recompile, replanned
from onnxtrain.errors import BackendError, BudgetError
from onnxtrain.execute import Footprint
from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir import shapes
from onnxtrain.ir.printer import in_bytes
from onnxtrain.options import Options
from onnxtrain.plan.lifetimes import peak
from onnxtrain.plan.recompute import Choice, choices

_LOG = logging.getLogger(__name__)
_TOP = 5  # tensors that an error names


@dataclasses.dataclass
class Fit:
    """A graph as it fits into the budget.

    Args:
        base: the graph that computes nothing again.
        compiled: the one that fits.
        sizes: the largest ones it was planned for.
        before: what a step of the first one needs; None where the backend cannot tell.
        footprint: what a step needs.
        chosen: what is computed again.
    """

    base: Compiled
    compiled: Compiled
    sizes: Mapping[str, int]
    before: Footprint | None = None
    footprint: Footprint | None = None
    chosen: Sequence[Choice] = ()


class Budget:
    """The budget of a bound graph: each of its compiled graphs is planned anew where a batch is larger than before.

    Args:
        options: the budget, and how graphs are compiled.
        report: receives times.
        device: where the graphs run.
    """

    def __init__(self, options: Options, report: Report, device: str) -> None:
        self._options, self._report, self._device = options, report, device
        self._fits: dict[int, Fit] = {}
        self._kept: list[Fit] = []  # all that there were: what else is known of a graph is known by its identity

    def fit(self, compiled: Compiled, sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor]) -> Fit:
        """A graph that gives the same as another and fits.

        Args:
            compiled: the graph that computes nothing again.
            sizes: of named dimensions, of the batch or the worst one.
            inputs: the batch: all inputs by name, and the rows.

        Raises:
            BudgetError: there is none.
        """
        known = self._fits.get(id(compiled))
        if known is not None and all(size <= known.sizes.get(name, 0) for name, size in sizes.items()):
            return known
        largest = dict(sizes) if known is None else {n: max(s, known.sizes.get(n, 0)) for n, s in sizes.items()}
        made = _Fitting(self._options, self._report, self._device, compiled, largest, inputs).found()
        self._fits[id(compiled)] = made
        self._kept.append(made)
        _LOG.info("%s", _line(made))
        return made

    def fitted(self, compiled: Compiled) -> Compiled:
        """The graph that runs in the place of another one, where that was planned already; else the other one."""
        known = self._fits.get(id(compiled))
        return compiled if known is None else known.compiled


class _Fitting:
    """The search for the first of a list of choices with which a graph fits.

    Args:
        options: the budget, and how graphs are compiled.
        report: receives times.
        device: where the graph runs.
        base: the graph.
        sizes: of named dimensions.
        inputs: of a batch that is no larger.
    """

    def __init__(
        self,
        options: Options,
        report: Report,
        device: str,
        base: Compiled,
        sizes: Mapping[str, int],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        self.options, self.report, self.device = options, report, device
        self.base, self.sizes, self.inputs = base, sizes, inputs
        self._peaks: dict[int, int] = {}
        self._made: dict[int, tuple[Compiled, Footprint]] = {}

    def found(self) -> Fit:
        """The graph that fits.

        Raises:
            BudgetError: there is none.
        """
        try:
            with self.report.stage("memory"):
                before = needed(self.base, self.sizes, self.inputs)
        except BackendError as error:
            _LOG.warning("the memory budget is not kept: %s", error.what)
            return Fit(self.base, self.base, self.sizes)
        self._made[0] = self.base, before
        most = self._bytes(before)
        if before.peak <= most or self.base.training is None:
            return Fit(self.base, self.base, self.sizes, before, before)
        with self.report.stage("memory"):
            self.choices = choices(self.base.training, self.base.plan, self.sizes, self.device)
        count = self._least() if self.options.memory_budget == "min" else self._first(most)
        compiled, footprint = self._at(count)
        return Fit(self.base, compiled, self.sizes, before, footprint, self.choices[:count])

    def _bytes(self, before: Footprint) -> int:
        """The budget in bytes; all that a step needs where there is none."""
        budget = self.options.memory_budget
        if budget is None or isinstance(budget, str):
            return before.peak if budget is None else 0
        return int(budget * before.peak) if isinstance(budget, float) else budget

    def _first(self, most: int) -> int:
        """The first number of choices with which a step needs at most so many bytes.

        It is looked for by the estimate, which does not know all, and then tried.
        """
        beyond = self._made[0][1].peak - self._peak(0)
        low, high = 0, len(self.choices)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._peak(middle) + beyond <= most else (middle + 1, high)
        count, step = low, 1
        while self._at(count)[1].peak > most:
            if count == len(self.choices):
                if (count := self._least()) and self._at(count)[1].peak <= most:
                    return count
                raise self._impossible(most, self._at(count)[1])
            count, step = min(len(self.choices), count + step), 2 * step
        return count

    def _least(self) -> int:
        """The number of choices with which a step needs least, of all that were tried, by the estimate of some."""
        count = len(self.choices)
        some = {count * i // 8 for i in range(4, 9)}
        for tried in sorted(some, key=self._peak)[:2]:
            self._at(tried)
        return min(self._made, key=lambda n: (self._made[n][1].peak, n))

    def _peak(self, count: int) -> int:
        """An estimate of the peak with so many choices."""
        if count not in self._peaks:
            with self.report.stage("memory"):
                plan = replanned(self.base, self.choices[:count])[1]
                self._peaks[count] = peak(plan, self.sizes)
        return self._peaks[count]

    def _at(self, count: int) -> tuple[Compiled, Footprint]:
        if count not in self._made:
            with self.report.stage("memory"):
                made = recompile(self.base, self.choices[:count], self.options, self.device)
                self._made[count] = made, needed(made, self.sizes, self.inputs)
        return self._made[count]

    def _impossible(self, most: int, least: Footprint) -> BudgetError:
        held = "".join(f"\n  {in_bytes(size):>10}  {line}" for line, size in least.holders[:_TOP])
        return BudgetError(
            f"a step needs at least {in_bytes(least.peak)} beside its weights and inputs, and the budget is "
            f"{in_bytes(most)}; most of that is{held}",
            cure="use a larger budget, or a smaller batch",
        )


def needed(compiled: Compiled, sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor]) -> Footprint:
    """What a step needs.

    Args:
        compiled: the step.
        sizes: of named dimensions.
        inputs: of a batch, by name: those of other sizes are resized.

    Raises:
        BackendError: the backend cannot tell.
    """
    given = dict(inputs)
    for name, cast in compiled.plan.signature.casts.items():
        given[name] = torch.empty_like(inputs[cast.parameter], dtype=torch_dtype(cast.dtype), device="meta")
    return compiled.executable.footprint(
        [_resized(given[str(v.name)], v, sizes) for v in compiled.plan.forward.graph.inputs]
    )


def _resized(tensor: torch.Tensor, value: ir.Value, sizes: Mapping[str, int]) -> torch.Tensor:
    """A tensor with the sizes that an input of a graph has: itself, or one without content."""
    named = zip(shapes.dims_of(value) or tensor.shape, tensor.shape, strict=True)
    shape = [size if isinstance(dim, int) else sizes.get(str(dim.value), size) for dim, size in named]
    return tensor if shape == [*tensor.shape] else torch.empty(shape, dtype=tensor.dtype, device="meta")


def _line(fit: Fit) -> str:
    """What a plan does, for the log."""
    if fit.before is None or fit.footprint is None:
        return "the memory budget is not kept"
    if not fit.chosen:
        return f"a step needs {in_bytes(fit.before.peak)}, which the budget has"
    count = sum(len(c.dropped) for c in fit.chosen)
    return (
        f"a step needs {in_bytes(fit.footprint.peak)} rather than {in_bytes(fit.before.peak)}: "
        f"{count} saved values are computed again"
    )
