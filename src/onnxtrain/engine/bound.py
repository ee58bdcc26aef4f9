"""A graph bound to live tensors, and the compiled variants of it that training needs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import torch

from onnxtrain.capture import Path
from onnxtrain.compiler import Compiled, Report, backward_graph, compile_graph
from onnxtrain.engine import comparison
from onnxtrain.engine.budget import Budget, Fit
from onnxtrain.engine.casts import CastCache
from onnxtrain.engine.expected import Expected
from onnxtrain.engine.parts import Part, Parts
from onnxtrain.engine.path_check import PathCheck
from onnxtrain.engine.rows import DENSE, NOTHING, Batch, RowPlan, beside, can_wait, rows_in_order
from onnxtrain.engine.sizes import InputSizes
from onnxtrain.engine.tensors import Given, Owned, as_torch
from onnxtrain.engine.visible import visible
from onnxtrain.engine.work import Work
from onnxtrain.errors import BackendError
from onnxtrain.gradient import origins_of_outputs
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.layers import NotRepeatedError
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.rows import RowSet, Sizes, text_of
from onnxtrain.options import Options

_LOG = logging.getLogger(__name__)
_Names: TypeAlias = tuple[str, ...]
_Same: TypeAlias = frozenset[tuple[str, str]]  # sizes, with those that they are the same as
Compare: TypeAlias = Callable[[Sequence[torch.Tensor]], comparison.Reference]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The graph for one batch.

    Args:
        compiled: the compiled graph.
        batch: what was found of the batch.
        rows: the inputs of the graph that say which rows.
        waiting: outputs that it does not have: they are computed when they are read.
        zeros: outputs that are zeros beside the rows of a set.
        asked: outputs whose gradients it was chosen for.
    """

    compiled: Compiled
    batch: Batch = NOTHING
    rows: tuple[Any, ...] = ()
    waiting: frozenset[str] = frozenset()
    zeros: Mapping[str, RowSet] = dataclasses.field(default_factory=dict)
    asked: frozenset[str] = frozenset()

    @property
    def named_rows(self) -> dict[str, Any]:
        """The rows by the names of the inputs that they are."""
        return dict(zip(self.compiled.plan.signature.rows, self.rows, strict=True))


class BoundGraph:
    """A forward graph bound to the tensors that own its parameters and buffers.

    A variant is compiled for each set of outputs that receives a gradient: at first the scalar ones (a loss) where
    there are some, later those that really did.

    Args:
        graph: an optimized forward graph.
        owned: its parameters and buffers.
        options: backend and checks.
        report: receives times and passes.
        path: what the graph stands on that is seen in tensors.
        place_of: where an output is in what the user is given, for messages.
        compare: from the user's tensors of a step, what the step is compared with where it is verified.
        state: outputs that later calls read, in all rows.
    """

    def __init__(
        self,
        graph: ForwardGraph,
        owned: Owned,
        options: Options,
        report: Report,
        path: Path | None = None,
        place_of: Callable[[str], str] = str,
        compare: Compare | None = None,
        state: Collection[str] = (),
    ) -> None:
        self.graph, self.owned, self.options, self.report = graph, owned, options, report
        self.path, self.place_of, self.compare = path or Path(), place_of, compare
        self.signature = graph.signature
        self._short = graph.short or graph  # what variants are made of, as long as its layers stay alike
        self.seen = frozenset(self.signature.outputs[p] for p in self.path.outputs)
        self._needed = self.seen.union(state)
        self._variants: dict[tuple[_Names, _Names, _Names, frozenset[RowSet], _Same], Compiled] = {}
        self._row_plans: dict[tuple[_Names, _Names, _Names, bool, _Same], RowPlan] = {}
        self.sizes = InputSizes(graph.model.graph, self.signature.user_inputs)
        self._inspectors: dict[int, Compiled] = {}
        self.read: set[str] = set()  # outputs that were computed late because somebody read them
        self.latest_choice: tuple[Chosen, RowPlan] | None = None  # of the last step that could drop rows
        self.steps = 0
        self.latest_step: tuple[Chosen, Mapping[str, int]] | None = None  # that trained, and the sizes of its inputs
        self._work = Work(graph)
        self.ignores_padding: bool | None = None  # whether gradients from outside are zero there; None: not seen yet
        self.exact = False  # whether nothing may be skipped: a step is compared with eager's random numbers
        self.casts = CastCache() if options.cache_casts else None
        self._watched: dict[int, frozenset[str]] = {}
        origins = graph.signature.origins
        self.origins = origins_of_outputs(graph) if origins is None else origins
        self._trainable = frozenset().union(*self.origins.values())
        self.expected = Expected(self._guess(), self.signature.outputs)
        self.verification: comparison.Report | None = None
        self.path_check = PathCheck(graph, self.path, self._compile_inspection)
        self._backward: dict[tuple[_Names, _Names], Backward] = {}
        self._parts = Parts(options, owned.device, graph.model.graph, self.path)
        self.budget = Budget(options, report, owned.device)
        self.is_random = any(Trait.RANDOM in traits_of(node) for node in graph.model.graph)

    @property
    def is_unverified(self) -> bool:
        """Whether the next step is to be compared with something else."""
        return self.compare is not None and self.options.verify and self.verification is None

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All graph inputs of a call: the user's tensors, then the parameters and buffers as they are now."""
        return [*tensors, *self.owned.now()]

    def choose(
        self, inputs: Mapping[str, torch.Tensor], differentiable: Sequence[str], outputs: Sequence[str]
    ) -> Chosen:
        """The compiled graph for a batch whose given outputs receive gradients; compiled when first asked for.

        Args:
            inputs: all graph inputs by name.
            differentiable: names of the inputs whose gradient is wanted.
            outputs: names of the outputs that receive one.
        """
        chosen = self._choose(inputs, differentiable, outputs)
        if differentiable and self.budget.asks(chosen.compiled):
            self._fit(chosen, inputs)
        fitted = self.budget.fitted(chosen.compiled)
        return chosen if fitted is chosen.compiled else dataclasses.replace(chosen, compiled=fitted)

    def planned(
        self, inputs: Mapping[str, torch.Tensor], differentiable: Sequence[str], outputs: Sequence[str]
    ) -> tuple[Chosen, Fit]:
        """What ``choose`` gives, and how it fits into the memory budget.

        Raises:
            BudgetError: there is none that does.
        """
        chosen = self._choose(inputs, differentiable, outputs)
        fit = self._fit(chosen, inputs)
        return dataclasses.replace(chosen, compiled=fit.compiled), fit

    def _choose(
        self, inputs: Mapping[str, torch.Tensor], differentiable: Sequence[str], outputs: Sequence[str]
    ) -> Chosen:
        if not self.options.compute_optimizer or self.exact:
            return Chosen(self.variant(differentiable, outputs), asked=frozenset(outputs))
        sizes = self.sizes.of(inputs)
        self.sizes.narrow(sizes)
        plan = self.row_plan(differentiable, outputs)
        batch = self._inspect(plan, inputs, sizes)
        packed, compiled = plan.packed(batch.active), self.variant(differentiable, outputs, plan, batch.active)
        rows = tuple(rows_in_order(packed, batch))
        chosen = Chosen(compiled, batch, rows, plan.waiting, packed.zeros, frozenset(outputs))
        if differentiable:
            self.latest_choice = (chosen, plan)
        return chosen

    def learn_padding(self, inputs: Mapping[str, torch.Tensor], dys: Mapping[str, torch.Tensor | None]) -> None:
        """See from the gradients of a first step whether what is computed of the outputs outside reads padding.

        Where it does not, later steps leave padding out and check that this stays so.
        """
        if self.ignores_padding is not None or self.options.strict or not self.options.padding_elimination:
            return
        outside = {n: dy for n, dy in dys.items() if dy is not None and dy.dim() > 2}
        if not outside or self.exact:
            return
        plan = self._row_plan(self.differentiable_of(inputs), tuple(n for n, dy in dys.items() if dy is not None), True)
        batch = self._inspect(plan, inputs, self.sizes.of(inputs))
        rows = {n: plan.rows_of_output(n) for n in outside}
        if any(r is None or r not in batch.held for r in rows.values()):
            self.ignores_padding = False
            return
        dropped = [beside(dy, batch.held[rows[n]]) for n, dy in outside.items()]  # type: ignore[index]
        if sum(len(d) for d in dropped) and any(dy.any() for dy in outside.values()):
            self.ignores_padding = not any(d.any() for d in dropped)
            state = "ignores padding, which is left out from now on" if self.ignores_padding else "reads padding"
            _LOG.info("what is computed of %s outside %s", ", ".join(map(self.place_of, outside)), state)

    def differentiable_of(self, inputs: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the inputs that require a gradient, and on which torch would say that an output depends."""
        return [name for name in self.signature.inputs if inputs[name].requires_grad and name in self._trainable]

    def work(self, chosen: Chosen, sizes: Mapping[str, int]) -> tuple[int, int] | None:
        """The floating point operations of a training step, and those of eager; None where content decides on sizes.

        Args:
            chosen: the step's graph.
            sizes: of the user's inputs.
        """
        return self._work.of(chosen.compiled, self._with_rows(chosen, sizes))

    def sizes_of(self, chosen: Chosen, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The sizes of a step: those of the user's inputs, and how many rows there are."""
        return self._with_rows(chosen, self.sizes.of(inputs))

    def _with_rows(self, chosen: Chosen, sizes: Mapping[str, int]) -> dict[str, int]:
        rows = chosen.named_rows
        return {**sizes, **InputSizes(chosen.compiled.forward.model.graph, rows).of(rows)}

    def _fit(self, chosen: Chosen, inputs: Mapping[str, torch.Tensor]) -> Fit:
        sizes = self.sizes_of(chosen, inputs)
        if self.options.worst_case is not None:
            worst = self.sizes.worst(self.options.worst_case)
            if chosen.rows and self.latest_choice is not None:
                whole = {name: worst.get(name, sizes[name]) for name in self.sizes.names}
                worst |= self.latest_choice[1].most(chosen.batch.active, whole)
            sizes = {name: max(size, worst.get(name, 0)) for name, size in sizes.items()}
        fit = self.budget.fit(chosen.compiled, sizes, {**inputs, **chosen.named_rows})
        self._watched.setdefault(id(fit.compiled), visible(fit.compiled))
        return fit

    def row_plan(self, differentiable: Sequence[str], outputs: Sequence[str]) -> RowPlan:
        """Which rows matter where these outputs receive gradients and those that were read before are shown."""
        relaxed = bool(self.ignores_padding) and not self.options.strict
        return self._row_plan(differentiable, outputs, relaxed)

    def _row_plan(self, differentiable: Sequence[str], outputs: Sequence[str], relaxed: bool) -> RowPlan:
        same = self.sizes.same
        key = (tuple(differentiable), tuple(outputs), tuple(sorted(self.read)), relaxed, frozenset(same.items()))
        if key not in self._row_plans:
            named = {str(v.name): v for v in self.graph.model.graph.outputs}
            lazy = self.options.lazy_outputs and any(_is_scalar(named[n]) for n in outputs)
            beside = [n for n in self.signature.outputs if n not in outputs]
            known = Sizes(self.graph.model.graph)
            kept = self.read | self._needed
            late = [n for n in beside if lazy and n not in kept and can_wait(named[n], known)]
            strict = self.options.strict or not differentiable
            shown = dict.fromkeys(outputs, not relaxed)
            shown |= {n: strict or n in self._needed for n in beside if n not in late}
            with self.report.stage("skip"):
                trained = {*self.signature.parameters, *differentiable}  # a mask that is learned hides nothing
                plan = RowPlan(self._short, trained, shown, late, same, self.options)
            self.report.passes += plan.passes
            self._row_plans[key] = plan
        return self._row_plans[key]

    def _inspect(self, plan: RowPlan, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Batch:
        if plan.inspection is None or not any(plan.limits(sizes).values()):
            return NOTHING
        if id(plan) not in self._inspectors:
            graph = plan.inspection.graph
            try:
                self._inspectors[id(plan)] = self._compile_inspection(graph)
            except BackendError as error:
                _LOG.warning("no rows are dropped: the backend cannot inspect batches: %s", error.what)
                plan.inspection, plan.sets = None, []
                return NOTHING
        given = [inputs[name] for name in plan.inspection.graph.signature.inputs]
        found, _ = self._inspectors[id(plan)].executable.forward(given)
        return plan.batch([as_torch(t) for t in found], sizes)

    def _compile_inspection(self, graph: ForwardGraph) -> Compiled:
        return compile_graph(graph, (), (), self.options, self.report, self.owned.device)

    def variant(
        self,
        differentiable: Sequence[str],
        outputs: Sequence[str],
        plan: RowPlan | None = None,
        active: frozenset[RowSet] = DENSE,
    ) -> Compiled:
        """The compiled graph whose given outputs receive gradients, for some rows; made when first asked for.

        Args:
            differentiable: names of the inputs whose gradient is wanted.
            outputs: names of the outputs that receive one.
            plan: which rows matter; None computes all rows and outputs.
            active: the sets whose rows alone are computed.
        """
        same = frozenset(() if plan is None else plan.same.items())
        key = (tuple(differentiable), tuple(outputs), () if plan is None else plan.outputs, active, same)
        if key not in self._variants:
            made = self._compiled(differentiable, outputs, plan, active)
            self._variants[key] = made
            self._watched[id(made)] = visible(made)
        return self._variants[key]

    def _compiled(
        self, differentiable: Sequence[str], outputs: Sequence[str], plan: RowPlan | None, active: frozenset[RowSet]
    ) -> Compiled:
        graph = self._short
        if plan is not None:
            with self.report.stage("skip"):
                graph = plan.packed(active).graph
        try:
            where = self.owned.device, self.owned.gathering(self.graph.model.graph)
            return compile_graph(graph, differentiable, outputs, self.options, self.report, *where)
        except NotRepeatedError as error:
            _LOG.info("the step is built of all layers: %s", error)
            self._short = self.graph
            self._inspectors.clear()
            for known in self._row_plans.values():
                known.become(self.graph)
            return self._compiled(differentiable, outputs, plan, active)

    def backward(self, differentiable: Sequence[str], outputs: Sequence[str]) -> Backward:
        """The backward pass as a graph of its own, which can be differentiated; built when first asked for.

        Args:
            differentiable: names of the inputs whose gradient is wanted.
            outputs: names of the outputs that receive one.
        """
        key = (tuple(differentiable), tuple(outputs))
        if key not in self._backward:
            graph, training = backward_graph(self.graph, *key, self.options, self.report)
            given = Given(self.owned.device, self.owned.shards)
            bound = BoundGraph(graph, given, self.options.of_gradient, self.report)
            self._backward[key] = Backward(bound, training.output_gradients, training.gradients)
        return self._backward[key]

    def parts(self, chosen: Chosen, inputs: Mapping[str, torch.Tensor]) -> Sequence[Part]:
        """The nodes of autograd that the backward pass of a step has, in its order.

        Args:
            chosen: the step's graph.
            inputs: all graph inputs by name.
        """
        return self._parts.of(chosen.compiled, inputs, lambda: self.work(chosen, self.sizes.of(inputs)))

    def variants(self) -> list[str]:
        """What was compiled: which outputs receive gradients, how many tensors, for which rows, in how many parts."""
        found = []
        for (gradients, outputs, _, active, _), compiled in self._variants.items():
            rows = "".join(f"; rows where {text_of(s)}" for s in sorted(active, key=text_of))
            count = self._parts.count(self.budget.fitted(compiled))
            parts = f"; the backward pass in {count} parts" if count > 1 else ""
            found.append(
                f"compiled for gradients of {len(gradients)} tensors from {', '.join(outputs)}{rows}{parts}"
                if gradients
                else "compiled without gradients"
            )
            found += [f"  {line}" for line in compiled.executable.told()]
        for (gradients, outputs), backward in self._backward.items():
            found.append(f"gradients of {len(gradients)} tensors from {', '.join(outputs)} as a graph of their own")
            found += [f"  {line}" for line in backward.bound.variants()]
        return found

    @property
    def latest(self) -> Compiled:
        """The variant compiled last, training ones before those for inference."""
        compiled = [self.budget.fitted(c) for c in self._variants.values()]
        return ([c for c in compiled if c.training is not None] or compiled)[-1]

    def _guess(self) -> tuple[str, ...]:
        """The outputs that probably receive a gradient: a loss is a number."""
        named = {str(v.name): v for v in self.graph.model.graph.outputs}
        trained = [n for n in self.signature.outputs if n not in self.seen and self.origins.get(n)]
        scalars = [n for n in trained if (shape := named[n].shape) is not None and len(shape) == 0]
        return tuple(scalars or trained)

    def is_tracked(self, output: str, differentiable: Sequence[str]) -> bool:
        """Whether eager PyTorch says of an output that it requires a gradient, where these inputs do."""
        return not self.reached([output]).isdisjoint(differentiable)

    def reached(self, outputs: Iterable[str]) -> frozenset[str]:
        """The inputs that eager PyTorch gives a gradient, if only zeros, where these outputs receive one."""
        return frozenset().union(*(self.origins.get(output, ()) for output in outputs))

    def watched(self, compiled: Compiled) -> frozenset[str]:
        """Names of inputs and outputs whose memory the backward pass of a variant reads."""
        return self._watched[id(compiled)]


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward pass of a graph as a graph of its own.

    Args:
        bound: takes all inputs of the first one, then the gradients of its outputs; gives gradients of its inputs.
        output_gradients: name of an output to the input that takes its gradient.
        gradients: name of an input to the output that is its gradient.
    """

    bound: BoundGraph
    output_gradients: Mapping[str, str]
    gradients: Mapping[str, str]


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 0
