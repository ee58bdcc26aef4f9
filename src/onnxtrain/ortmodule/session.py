"""One captured graph of a module and the compiled variants of it that training needs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import Answers, Captured, Numbers, leave
from onnxtrain.compiler import Compiled, Report, capture_module, compile_graph, differentiated
from onnxtrain.errors import BackendError
from onnxtrain.gradient import tracked_outputs
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.rows import RowSet, Sizes, text_of
from onnxtrain.options import Options
from onnxtrain.ortmodule import verification
from onnxtrain.ortmodule.casts import CastCache
from onnxtrain.ortmodule.checks import is_gathered
from onnxtrain.ortmodule.expected import Expected
from onnxtrain.ortmodule.guards import size_check
from onnxtrain.ortmodule.path_check import PathCheck
from onnxtrain.ortmodule.rows import DENSE, NOTHING, Batch, RowPlan, beside, rows_in_order
from onnxtrain.ortmodule.sizes import InputSizes
from onnxtrain.ortmodule.tensors import as_torch
from onnxtrain.plan.cost import Flops, flops, training_flops

_LOG = logging.getLogger(__name__)
_Names: TypeAlias = tuple[str, ...]
_Same: TypeAlias = frozenset[tuple[str, str]]  # sizes, with those that they are the same as


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


class Session:
    """A captured graph bound to a module's own tensors.

    A variant is compiled for each set of outputs that receives a gradient: at first the scalar ones (a loss) where
    there are some, later those that really did.

    Args:
        module: the user's module; its parameters and buffers are used in place.
        args: positional arguments of the first call.
        kwargs: keyword arguments of the first call.
        options: backend and checks.
        numbers: for a structure of arguments, the positions of numbers that are captured as tensors.
        answers: what the call saw in tensors, where it was rehearsed.

    Raises:
        CaptureError: the module cannot be captured; names the source line.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: Options,
        numbers: Numbers | None = None,
        answers: Answers | None = None,
    ) -> None:
        self.module, self.report = module, Report()
        self.options = dataclasses.replace(
            options,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            cache_casts=options.cache_casts and not is_gathered(module),
        )
        self.captured: Captured = capture_module(module, args, kwargs, self.options, self.report, numbers, answers)
        self.announced = False  # whether the user was told what this graph does
        self.was_training = module.training
        self.fits = size_check(self.captured)
        self.signature = self.captured.graph.signature
        self.seen = frozenset(self.signature.outputs[p] for p in self.captured.path.outputs)
        self._parameters = [self._place(name) for name in self.signature.parameters]
        self._buffers = [self._place(name) for name in self.signature.buffers]
        self._updated = [self._place(name) for name in self.signature.buffer_updates]
        self._variants: dict[tuple[_Names, _Names, _Names, frozenset[RowSet], _Same], Compiled] = {}
        self._row_plans: dict[tuple[_Names, _Names, _Names, bool, _Same], RowPlan] = {}
        self.sizes = InputSizes(self.captured.graph.model.graph, self.signature.user_inputs)
        self._inspectors: dict[int, Compiled] = {}
        self.read: set[str] = set()  # outputs that were computed late because somebody read them
        self.latest_choice: tuple[Chosen, RowPlan] | None = None  # of the last step that could drop rows
        self.steps = 0
        self.latest_work: tuple[int, int] | None = None  # operations of that step, and eager's
        self._work: dict[object, Flops] = {}
        self.ignores_padding: bool | None = None  # whether gradients from outside are zero there; None: not seen yet
        self.exact = False  # whether nothing may be skipped: a step is compared with eager's random numbers
        self.casts = CastCache() if self.options.cache_casts else None
        self._watched: dict[int, frozenset[str]] = {}
        self._tracked: dict[_Names, frozenset[str]] = {}
        self.expected = Expected(self._guess(), self.signature.outputs)
        self.verification: verification.Report | None = None
        self.path_check = PathCheck(self.captured, self._compile_inspection)
        self.is_random = any(Trait.RANDOM in traits_of(node) for node in self.captured.graph.model.graph)

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.module.get_submodule(path), leaf

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All graph inputs of a call: the user's tensors, and the parameters and buffers that the module has now."""
        parameters = [m._parameters[leaf] for m, leaf in self._parameters]
        buffers = [m._buffers[leaf] for m, leaf in self._buffers]
        return [*tensors, *parameters, *buffers]  # type: ignore[list-item]

    def differentiable(self, inputs: Sequence[torch.Tensor]) -> list[str]:
        """Names of the graph inputs that require a gradient, where one is wanted at all."""
        if not torch.is_grad_enabled():
            return []
        return self.differentiable_of(dict(zip(self.signature.inputs, inputs, strict=True)))

    def choose(
        self, inputs: Mapping[str, torch.Tensor], differentiable: Sequence[str], outputs: Sequence[str]
    ) -> Chosen:
        """The compiled graph for a batch whose given outputs receive gradients; compiled when first asked for.

        Args:
            inputs: all graph inputs by name.
            differentiable: names of the inputs whose gradient is wanted.
            outputs: names of the outputs that receive one.
        """
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
        """Names of the inputs that require a gradient."""
        return [name for name in self.signature.inputs if inputs[name].requires_grad]

    def work(self, chosen: Chosen, inputs: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
        """The floating point operations of a training step, and those of eager; None where content decides on sizes.

        Args:
            chosen: the step's graph.
            inputs: all graph inputs by name.
        """
        compiled, graph = chosen.compiled, self.captured.graph
        assert compiled.training is not None
        differentiable = compiled.training.signature.differentiable
        sizes, counts = self.sizes.of(inputs), compiled.plan.signature.rows
        rows = InputSizes(compiled.training.model.graph, counts).of(dict(zip(counts, chosen.rows, strict=True)))
        ours = self._flops(id(compiled), lambda: flops(compiled.training.model.graph))  # type: ignore[union-attr]
        eager = self._flops(differentiable, lambda: training_flops(graph, differentiable))
        if not {*ours.symbols, *eager.symbols} <= {*sizes, *rows}:
            return None
        return ours.evaluate(sizes | rows), eager.evaluate(sizes)

    def _flops(self, key: object, count: Callable[[], Flops]) -> Flops:
        if key not in self._work:
            self._work[key] = count()
        return self._work[key]

    def row_plan(self, differentiable: Sequence[str], outputs: Sequence[str]) -> RowPlan:
        """Which rows matter where these outputs receive gradients and those that were read before are shown."""
        relaxed = bool(self.ignores_padding) and not self.options.strict
        return self._row_plan(differentiable, outputs, relaxed)

    def _row_plan(self, differentiable: Sequence[str], outputs: Sequence[str], relaxed: bool) -> RowPlan:
        same = self.sizes.same
        key = (tuple(differentiable), tuple(outputs), tuple(sorted(self.read)), relaxed, frozenset(same.items()))
        if key not in self._row_plans:
            named = {str(v.name): v for v in self.captured.graph.model.graph.outputs}
            lazy = self.options.lazy_outputs and any(_is_scalar(named[n]) for n in outputs)
            beside = [n for n in self.signature.outputs if n not in outputs]
            known = Sizes(self.captured.graph.model.graph)
            kept = self.read | self.seen
            late = [n for n in beside if lazy and n not in kept and _can_wait(named[n], known)]
            strict = self.options.strict or not differentiable
            shown = dict.fromkeys(outputs, not relaxed)
            shown |= {n: strict or n in self.seen for n in beside if n not in late}
            with self.report.stage("skip"):
                trained = {*self.signature.parameters, *differentiable}  # a mask that is learned hides nothing
                plan = RowPlan(self.captured.graph, trained, shown, late, same, self.options)
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
        found, _ = self._inspectors[id(plan)].executable.forward(list(inputs.values()))
        return plan.batch([as_torch(t) for t in found], sizes)

    def _compile_inspection(self, graph: ForwardGraph) -> Compiled:
        return compile_graph(graph, (), (), self.options, self.report, self._device())

    def _device(self) -> str:
        return next((str(t.device) for t in self.module.parameters()), "cpu")

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
            graph = self.captured.graph
            if plan is not None:
                with self.report.stage("skip"):
                    graph = plan.packed(active).graph
            made = compile_graph(graph, differentiable, outputs, self.options, self.report, self._device())
            self._variants[key] = made
            self._watched[id(made)] = _visible(made)
        return self._variants[key]

    def variants(self) -> list[str]:
        """What was compiled: which outputs receive gradients, how many tensors, and for which rows."""
        found = []
        for gradients, outputs, _, active, _ in self._variants:
            rows = "".join(f"; rows where {text_of(s)}" for s in sorted(active, key=text_of))
            found.append(
                f"compiled for gradients of {len(gradients)} tensors from {', '.join(outputs)}{rows}"
                if gradients
                else "compiled without gradients"
            )
        return found

    @property
    def latest(self) -> Compiled:
        """The variant compiled last, training ones before those for inference."""
        compiled = list(self._variants.values())
        return ([c for c in compiled if c.training is not None] or compiled)[-1]

    def _guess(self) -> tuple[str, ...]:
        """The outputs that probably receive a gradient: a loss is a number."""
        named = {str(v.name): v for v in self.captured.graph.model.graph.outputs}
        floating = [
            n
            for n in self.signature.outputs
            if n not in self.seen and (d := named[n].dtype) is not None and d.is_floating_point()
        ]
        scalars = [n for n in floating if (shape := named[n].shape) is not None and len(shape) == 0]
        return tuple(scalars or floating)

    def write_buffers(self, updates: Sequence[torch.Tensor]) -> None:
        """Write new buffer contents (running statistics) into the module's own buffers."""
        with torch.no_grad():
            for (owner, leaf), content in zip(self._updated, updates, strict=True):
                owner._buffers[leaf].copy_(content)  # type: ignore[union-attr]

    def is_tracked(self, output: str, differentiable: Sequence[str]) -> bool:
        """Whether eager PyTorch says of an output that it requires a gradient, where these inputs do."""
        key = tuple(differentiable)
        if key not in self._tracked:
            self._tracked[key] = frozenset(tracked_outputs(differentiated(self.captured.graph, key)))
        return output in self._tracked[key]

    def watched(self, compiled: Compiled) -> frozenset[str]:
        """Names of inputs and outputs whose memory the backward pass of a variant reads."""
        return self._watched[id(compiled)]

    def place_of(self, output: str) -> str:
        """Where an output of the graph is in what the module returns: ``logits``, ``hidden_states[1]``."""
        schema = self.captured.outputs
        index = self.signature.outputs.index(output)
        positions = schema.restore(list(range(schema.tensors)))
        for path, position in pytree.tree_flatten_with_path(positions)[0]:
            if type(position) is int and self.captured.sources[position] == index:
                if self.captured.left and path[0].idx == 1:
                    return self.captured.left[path[1].idx].label
                path = path[1:] if self.captured.left else path
                return pytree.keystr(path).replace("['", "", 1).replace("']", "", 1).lstrip(".") or output
        return output

    def restore(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The user's output structure with these tensors in it; what the call leaves on the module is put there."""
        made = self.captured.outputs.restore([outputs[i] for i in self.captured.sources])
        if not self.captured.left:
            return made
        result, values = made
        leave(self.module, self.captured.left, values)
        return result


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 0


def _can_wait(value: ir.Value, known: Sizes) -> bool:
    """Whether an output is a tensor whose sizes are known without computing it."""
    return bool(value.shape) and all(map(known.knows, value.shape))


def _visible(compiled: Compiled) -> frozenset[str]:
    """Inputs and outputs that share memory with a saved value, through any number of views."""
    graph, signature = compiled.plan.forward.graph, compiled.plan.signature
    named = {str(v.name): v for v in (*graph.inputs, *graph.outputs)}
    roots = {_root(named[name]) for name in compiled.plan.saved}
    return frozenset(n for n in signature.inputs + signature.outputs if n in named and _root(named[n]) in roots)


def _root(value: ir.Value) -> ir.Value:
    """The value whose memory a view shares; itself where it is none."""
    node = value.producer()
    while node is not None and Trait.VIEW in traits_of(node) and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value
