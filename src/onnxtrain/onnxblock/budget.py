"""A training model within a stated number of bytes: what its backward pass computes again so that less is kept."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.errors import BudgetError, OptionError, ShapeError, close_to
from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import size_of, with_sizes
from onnxtrain.ir.graphs import TrainingGraph
from onnxtrain.ir.printer import in_bytes
from onnxtrain.ir.standard_form import write_out_nodes
from onnxtrain.options import Options
from onnxtrain.plan import make_plan
from onnxtrain.plan.budgets import allowed, first_within
from onnxtrain.plan.cheapest import cheapest_within
from onnxtrain.plan.copies import recomputed
from onnxtrain.plan.late import hold_back
from onnxtrain.plan.lifetimes import peak_of_whole
from onnxtrain.plan.recompute import Choice, Search
from onnxtrain.plan.sizes import free_sizes
from onnxtrain.plan.timeline import changes, pruned

_LOG = logging.getLogger(__name__)


def fitted(training: TrainingGraph, loss: str, options: Options) -> TrainingGraph:
    """The graph as it fits into the budget of the options, by an estimate for the largest batch.

    Args:
        training: the graph as it computes nothing again; what reads sizes in it changes.
        loss: the output that the backward pass begins with.
        options: the budget and the shapes of the largest batch.

    Raises:
        OptionError: the shapes of the largest batch are missing, or the model has no such inputs.
        BudgetError: no choice of what is computed again fits.
    """
    budget = options.memory_budget
    assert budget is not None
    sizes = _sizes(training, options.worst_case or {})
    free_sizes(training.model.graph, _largest(training, sizes).model.graph)
    search = _Search(_largest(training, sizes))
    most = allowed(budget, search.peak(0))
    chosen = search.least() if budget == "min" else search.within(most)
    _LOG.info(
        "a step needs %s rather than %s beside its weights and inputs: %d nodes run again",
        *(in_bytes(search.peak_with(chosen)), in_bytes(search.peak(0)), sum(len(c.nodes) for c in chosen)),
    )
    made = recomputed(training, make_plan(training), chosen)
    hold_back(made, loss)
    return dataclasses.replace(made, gradients=_last_first(made))


def _last_first(training: TrainingGraph) -> dict[str, str]:
    """The gradients, the last one first, so that each is added to its buffer as soon as it is there.

    onnxruntime begins with the last node that nothing reads, and what that needs.
    """
    place = {str(v.name): i for i, n in enumerate(training.model.graph) for v in n.outputs}
    return dict(sorted(training.gradients.items(), key=lambda item: -place.get(item[1], 0)))


class _Search:
    """The search for what to compute again.

    Args:
        largest: the graph with the sizes of the largest batch.
    """

    def __init__(self, largest: TrainingGraph) -> None:
        self.largest, self.plan = largest, make_plan(largest)
        self.choices: Sequence[Choice] = [*Search(largest, self.plan, {}, "cpu").run()]
        model = write_out_nodes(largest.model, lambda node: True)  # other runtimes run the bodies of our operators
        self.whole = dataclasses.replace(largest, model=model)
        self._peaks: dict[int, int] = {}

    def peak(self, count: int) -> int:
        """The bytes that a step needs with so many choices."""
        if count not in self._peaks:
            self._peaks[count] = self.peak_with(self.choices[:count])
        return self._peaks[count]

    def peak_with(self, chosen: Sequence[Choice]) -> int:
        """The bytes that a step needs with choices."""
        return peak_of_whole(recomputed(self.whole, self.plan, chosen), {})

    def within(self, most: int) -> Sequence[Choice]:
        """The choices with which a step needs at most so many bytes, and that take the least time.

        Raises:
            BudgetError: there are none.
        """
        if self.peak(0) <= most:
            return ()
        told = changes(self.largest, self.plan, {}, self.choices)
        return cheapest_within(self.choices, *told, most, self.peak_with) or self.first(most)

    def first(self, most: int) -> Sequence[Choice]:
        """The first choices with which a step needs at most so many bytes; where there are none, those that need least.

        Raises:
            BudgetError: they are too many.
        """
        count = first_within(len(self.choices), self.peak, most)
        if self.peak(count) <= most:
            return self.choices[:count]
        chosen = self.least()
        if (need := self.peak_with(chosen)) > most:
            needs = f"a step needs at least {in_bytes(need)} beside its weights and inputs"
            what = f"{needs}, and the budget is {in_bytes(most)}"
            raise BudgetError(what, cure="use a larger budget, or a smaller batch in worst_case")
        return chosen

    def least(self) -> Sequence[Choice]:
        """The choices with which a step needs least, of some."""
        count = len(self.choices)
        best = min({*(count * i // 8 for i in range(9)), *self._peaks}, key=lambda n: (self.peak(n), n))
        tries = [self.choices[:best], *(pruned(self.largest, self.plan, {}, self.choices[:n]) for n in {best, count})]
        return min(tries, key=lambda chosen: (self.peak_with(chosen), len(chosen)))


def _largest(training: TrainingGraph, sizes: Mapping[str, int]) -> TrainingGraph:
    """The graph with the sizes of the largest batch."""
    try:
        return dataclasses.replace(training, model=with_sizes(training.model, sizes))
    except ShapeError as error:
        cure = "state shapes that the model takes"
        raise OptionError(f"worst_case: {error.what}", node=error.node, source=error.source, cure=cure) from error


def _sizes(training: TrainingGraph, stated: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes of the named dimensions of the inputs."""
    graph, signature = training.model.graph, training.signature
    inputs = {str(v.name): v for v in graph.inputs if v.name in signature.user_inputs}
    sizes: dict[str, int] = {}
    for name, shape in stated.items():
        if name not in inputs:
            cure = f"name {', '.join(inputs)}"
            raise OptionError(f"worst_case: there is no input {name}{close_to(name, inputs)}", cure=cure)
        dims = shapes.dims_of(inputs[name])
        if dims is None or len(dims) != len(shape):
            known = "an unknown number of" if dims is None else len(dims)
            raise OptionError(f"worst_case: {name} has {known} axes, not {len(shape)}", cure="state the size of each")
        for dim, size in zip(dims, shape, strict=True):
            expected = dim if isinstance(dim, int) else sizes.setdefault(str(dim.value), size)
            if expected != size:
                what = f"worst_case: {name} is {tuple(shape)}, where {expected} is the size {dim}"
                raise OptionError(what, cure="state shapes that inputs can have at once")
    _refuse_missing(inputs, sizes)
    return sizes


def _refuse_missing(inputs: Mapping[str, ir.Value], sizes: Mapping[str, int]) -> None:
    missing = {name: v for name, v in inputs.items() if any(not _is_known(d, sizes) for d in shapes.dims_of(v) or ())}
    if missing:
        shown = {name: _written(value) for name, value in missing.items()}
        what = "; ".join(f"{name} is {shape}" for name, shape in shown.items())
        names = ", ".join(f'"{name}": {shape}' for name, shape in shown.items())
        raise OptionError(
            f"memory_budget is kept for the largest batch, whose sizes are not known: {what}",
            cure=f"state them: worst_case={{{names}}} with numbers in the place of names",
        )


def _written(value: ir.Value) -> str:
    """A shape as a tuple: ``(batch, 3)``, ``(batch,)``."""
    dims = [*map(str, value.shape or ())]
    return f"({', '.join(dims)}{',' * (len(dims) == 1)})"


def _is_known(dim: shapes.Dim, sizes: Mapping[str, int]) -> bool:
    try:
        return size_of(dim, sizes) >= 0
    except KeyError:
        return False
