"""Steps within a stated number of bytes: what the backward pass computes again so that it keeps less."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch

from onnxtrain.compiler import Compiled, Report, graph_cache, recompile
from onnxtrain.engine import kept_plans
from onnxtrain.engine.by_hand import Plans
from onnxtrain.errors import BackendError, BudgetError, GraphError, OptionError
from onnxtrain.execute import Footprint, backend
from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import is_backward
from onnxtrain.ir.printer import in_bytes
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.options import Options
from onnxtrain.plan.budgets import allowed
from onnxtrain.plan.by_hand import RECOMPUTE, candidates, layer_inputs, probe_in_force
from onnxtrain.plan.cheapest import cheapest_within
from onnxtrain.plan.lifetimes import peak
from onnxtrain.plan.recompute import Choice, Search
from onnxtrain.plan.timeline import changes, peaks, pruned

_LOG = logging.getLogger(__name__)
_TOP = 5  # tensors that an error names
_OFF = 1000  # of a budget in bytes: what is left, where that is possible, for what no plan tells
_TRIES = 6  # plans that are tried because an estimate says that they fit


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
    """What the steps of a bound graph compute again: to keep a budget, or by hand.

    With a budget each compiled graph is planned anew where a batch is larger than before; by hand at its first step.

    Args:
        options: the budget, and how graphs are compiled.
        report: receives times.
        device: where the graphs run.

    Raises:
        OptionError: values are to wait where the step runs anyway.
    """

    def __init__(self, options: Options, report: Report, device: str) -> None:
        if options.memory_offload == "host" and torch.device(device).type == "cpu":
            raise OptionError("memory_offload='host': the step runs in the host's memory", cure="name a folder")
        self._options, self._report, self._device = options, report, device
        self._fits: dict[int, Fit] = {}
        self._plans = Plans(options, device)
        self._kept: list[Fit] = []  # all that there were: what else is known of a graph is known by its identity

    def asks(self, compiled: Compiled) -> bool:
        """Whether a step of a graph has to be planned before it runs: each within a budget, else the first."""
        return self._options.memory_budget is not None or id(compiled) not in self._fits

    def fit(self, compiled: Compiled, sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor]) -> Fit:
        """A graph that gives the same as another and fits.

        Args:
            compiled: the graph that computes nothing again.
            sizes: of named dimensions, of the batch or the worst one.
            inputs: the batch: all inputs by name, and the rows.

        Raises:
            BudgetError: there is none.
            OptionError: a plan by hand is for what is not there.
        """
        known = self._fits.get(id(compiled))
        if known is not None and all(size <= known.sizes.get(name, 0) for name, size in sizes.items()):
            return known
        largest = dict(sizes) if known is None else {n: max(s, known.sizes.get(n, 0)) for n, s in sizes.items()}
        with self._report.stage("memory"):
            if self._options.memory_budget is not None:
                made = _Fitting(self._options, self._device, compiled, largest, inputs).found()
            else:
                made = self._by_hand(compiled, largest) if known is None else dataclasses.replace(known, sizes=largest)
        self._fits[id(compiled)] = made
        self._kept.append(made)
        if made.chosen or self._options.memory_budget is not None:
            _LOG.info("%s", _line(made))
        return made

    def _by_hand(self, compiled: Compiled, sizes: Mapping[str, int]) -> Fit:
        chosen = self._plans.chosen(compiled, sizes)
        if not chosen:
            return Fit(compiled, compiled, sizes)
        return Fit(compiled, recompile(compiled, chosen, self._options, self._device), sizes, chosen=chosen)

    def tables(self) -> list[str]:
        """For each training graph that ran what could be computed again, as text."""
        found = [fit for fit in self._fits.values() if fit.base.training is not None]
        return [self._plans.table(fit.base, fit.sizes) for fit in found]

    def fitted(self, compiled: Compiled) -> Compiled:
        """The graph that runs in the place of another one, where that was planned already; else the other one."""
        known = self._fits.get(id(compiled))
        return compiled if known is None else known.compiled


class _Fitting:
    """The search for the first of a list of choices with which a graph fits.

    Args:
        options: the budget, and how graphs are compiled.
        device: where the graph runs.
        base: the graph.
        sizes: of named dimensions.
        inputs: of a batch that is no larger.
    """

    def __init__(
        self,
        options: Options,
        device: str,
        base: Compiled,
        sizes: Mapping[str, int],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        self.options, self.device = options, device
        self.base, self.sizes, self.inputs = base, sizes, inputs
        self._made: dict[int, tuple[Compiled, Footprint | None]] = {}

    def found(self) -> Fit:
        """The graph that fits.

        Raises:
            BudgetError: there is none.
        """
        stated = self.base.training is not None and self.options.memory_budget is not None
        cache = graph_cache(self.options) if stated else None
        if cache is None:
            return self._planned()
        name = kept_plans.name_of(self.base, self.sizes, self.options, self.device)
        kept = kept_plans.read(cache, name, self.base)
        if kept is None:
            fit = self._planned()
            kept_plans.write(cache, name, self.base, ([*fit.chosen], fit.before, fit.footprint))
            return fit
        chosen, before, footprint = kept
        compiled = recompile(self.base, chosen, self.options, self.device) if chosen else self.base
        return Fit(self.base, compiled, self.sizes, before, footprint, chosen)

    def _planned(self) -> Fit:
        before = self._told(self.base)
        self._made[0] = self.base, before
        most = self._bytes()
        room = most - most // _OFF if isinstance(self.options.memory_budget, int) else most
        if self.base.training is None or self._need(0) <= room:
            return Fit(self.base, self.base, self.sizes, before, before)
        draws_again = backend(self.options.backend).draws_again(self.device)
        offloads = self.options.memory_offload is not None
        search = Search(self.base.whole_training, self.base.plan, self.sizes, self.device, draws_again, offloads)
        self.choices = [*search.run()]
        self._seen = [(u.value, u.most, u.rest) for u in before.uses] if before else []
        self._changes = changes(self.base.whole_training, self.base.plan, self.sizes, self.choices, self._seen)
        self._curve = peaks(*self._changes)
        is_least = self.options.memory_budget == "min"
        if not is_least and (fit := self._cheapest(before, room)) is not None:
            return fit
        count = self._least() if is_least else self._first(room)
        compiled, footprint = self._at(count)
        fit = Fit(self.base, compiled, self.sizes, before, footprint, self.choices[:count])
        if not is_least and self._need(count) <= room:
            return fit
        others = (self._with(chosen, before) for chosen in (*self._pruned(count), *self._by_layers()))
        fit = min((fit, *filter(None, others)), key=self._needed_by)
        if self._needed_by(fit) > most and not is_least:
            raise self._impossible(most, fit)
        return fit

    def _with(self, chosen: Sequence[Choice], before: Footprint | None) -> Fit | None:
        """The graph with choices; None where some of them need others."""
        try:
            compiled = recompile(self.base, chosen, self.options, self.device)
        except GraphError:
            return None
        return Fit(self.base, compiled, self.sizes, before, self._told(compiled), chosen)

    def _cheapest(self, before: Footprint | None, most: int) -> Fit | None:
        """The graph that fits and takes the least time; None where it is not found, or where choices keep too much."""
        if min(self._curve) > most:
            return None
        fit: Fit | None = None

        def need(chosen: Sequence[Choice]) -> int | None:
            nonlocal fit
            fit = self._with(chosen, before)
            return None if fit is None else self._needed_by(fit)

        found = cheapest_within(self.choices, *self._changes, most, need)
        return None if found is None else fit

    def _pruned(self, count: int) -> Iterator[Sequence[Choice]]:
        """The first choices, and all, without those that raise the peak."""
        for most in sorted({count, len(self.choices)}):
            chosen = pruned(self.base.whole_training, self.base.plan, self.sizes, self.choices[:most], self._seen)
            if len(chosen) < most:
                yield chosen

    def _by_layers(self) -> Iterator[Sequence[Choice]]:
        """The other end of what there is: of a transformer's layers nothing is saved but what they begin with."""
        training = self.base.whole_training
        if layer_inputs(n for n in training.model.graph if not is_backward(n)):
            found = candidates(training, self.base.plan, self.sizes, self.device, probe_in_force("", 1))
            yield [c.choice for c in found if c.kind == RECOMPUTE]

    def _told(self, compiled: Compiled) -> Footprint | None:
        """What a step needs; None where the backend cannot tell."""
        try:
            return needed(compiled, self.sizes, self.inputs)
        except BackendError as error:
            if self.options.memory_budget is not None and not self._made:
                _LOG.warning("the memory budget is kept by an estimate: %s", error.what)
            return None

    def _bytes(self) -> int:
        """The budget in bytes; all that a step needs where there is none."""
        budget = self.options.memory_budget
        return self._need(0) if budget is None else allowed(budget, self._need(0))

    def _first(self, most: int) -> int:
        """The first number of choices with which a step needs at most so many bytes, or that with which it needs least.

        It is looked for by the estimate, which does not know all, and then tried: what was missing is added to those
        that follow.
        """
        missing, count = 0, 0
        for _ in range(_TRIES):
            low = [n for n, peak in enumerate(self._curve) if n > count and peak + missing <= most]
            if not low:
                break
            count = low[0]
            if self._need(count) <= most:
                return count
            missing = max(missing, self._missing(count))
        return self._least()

    def _least(self) -> int:
        """The number of choices with which a step needs least, of those that were tried.

        All of them are tried, too: of what comes last the estimate often says too much.
        """
        self._try_least()
        self._need(len(self._curve) - 1)
        self._try_least()
        return min(self._made, key=lambda n: (self._need(n), n))

    def _try_least(self) -> None:
        """Try the number of choices with which the estimate is least, until one was tried already."""
        for _ in range(_TRIES):
            count = min(range(len(self._curve)), key=lambda n: (self._curve[n] + self._missing(n), n))
            if count in self._made:
                break
            self._need(count)

    def _missing(self, count: int) -> int:
        """What the estimate lacks, of the nearest number of choices that was tried."""
        tried = min(self._made, key=lambda n: abs(n - count))
        return self._need(tried) - self._curve[tried]

    def _need(self, count: int) -> int:
        """The bytes that a step needs with so many choices."""
        return self._bytes_of(*self._at(count))

    def _needed_by(self, fit: Fit) -> int:
        return self._bytes_of(fit.compiled, fit.footprint)

    def _bytes_of(self, compiled: Compiled, footprint: Footprint | None) -> int:
        return peak(compiled.plan, self.sizes) if footprint is None else footprint.peak

    def _at(self, count: int) -> tuple[Compiled, Footprint | None]:
        if count not in self._made:
            made = recompile(self.base, self.choices[:count], self.options, self.device)
            self._made[count] = made, self._told(made)
        return self._made[count]

    def _impossible(self, most: int, fit: Fit) -> BudgetError:
        held = [] if fit.footprint is None else fit.footprint.holders[:_TOP]
        rows = "".join(f"\n  {in_bytes(size):>10}  {line}" for line, size in held)
        return BudgetError(
            f"a step needs at least {in_bytes(self._needed_by(fit))} beside its weights and inputs, and the budget is "
            f"{in_bytes(most)}{f'; most of that is{rows}' if rows else ''}",
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
    rows, values = {*compiled.plan.signature.rows}, compiled.plan.forward.graph.inputs
    found = compiled.executable.footprint([_resized(given[str(v.name)], v, sizes, v.name in rows) for v in values])
    return found.beside(_held_by_state(compiled, inputs))


def _held_by_state(compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes of what a step keeps so that it can run again: buffers as they were, and states of the generator."""
    plan = compiled.plan
    buffers = sum(inputs[name].nbytes for name in plan.signature.buffer_updates if name in inputs)
    random = [node.op_type for node in plan.forward.graph if Trait.RANDOM in traits_of(node)]
    return buffers + torch.get_rng_state().nbytes * (bool(random) + random.count("RandomState"))


def _resized(tensor: torch.Tensor, value: ir.Value, sizes: Mapping[str, int], is_rows: bool) -> torch.Tensor:
    """A tensor with the sizes that an input of a graph has: itself, the first rows, ones, or one without content."""
    dims = shapes.dims_of(value) or tensor.shape  # a parameter in shards has another shape now
    shape = [d if isinstance(d, int) else sizes.get(str(d.value), tensor.shape[i]) for i, d in enumerate(dims)]
    if shape == [*tensor.shape]:
        return tensor
    if is_rows:
        return torch.arange(shape[0], dtype=tensor.dtype, device=tensor.device)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    return torch.ones(shape, dtype=tensor.dtype, device=tensor.device)


def _line(fit: Fit) -> str:
    """What a plan does, for the log."""
    count, away = (sum(len(c.dropped) for c in fit.chosen if (c.moved is not None) == moved) for moved in (False, True))
    again = f"{count} saved values are computed again{f', {away} wait elsewhere' if away else ''}"
    if fit.before is None or fit.footprint is None:
        return again
    if not fit.chosen:
        return f"a step needs {in_bytes(fit.before.peak)}, which the budget has"
    return f"a step needs {in_bytes(fit.footprint.peak)} rather than {in_bytes(fit.before.peak)}: {again}"
