"""The spine: capture → optimize → gradient → plan → execute, one line per stage."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxtrain.execute import Executable, backend
from onnxtrain.garbage import uncollected
from onnxtrain.gradient import (
    build_gradient,
    gradients_as_outputs,
    origins_of_outputs,
    registered_by_users,
    tracked_outputs,
    undifferentiable,
    write_out_inner,
)
from onnxtrain.ir.functions import is_further, is_inner_gradient
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature, TrainingGraph
from onnxtrain.ir.layers import Layers, NotRepeatedError, short_names
from onnxtrain.ir.passes import Record, save
from onnxtrain.ir.shards import Gathering
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.ir.unfolding import make_whole, whole
from onnxtrain.ir.verify import invalid
from onnxtrain.optimize import apply_registered, hoist_casts, optimize, optimize_training, registered_for
from onnxtrain.options import Options
from onnxtrain.plan import make_plan, partition
from onnxtrain.plan.copies import recomputed, views_again
from onnxtrain.plan.recompute import Choice

if TYPE_CHECKING:
    from onnxtrain.capture import Answers, Axis, Captured, Functions, GraphCache, Numbers, Start, Traced


_LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Report:
    """What a compilation did.

    Attributes:
        seconds: time of each stage.
        passes: what each pass did.
        recorded: how many calls of operators the trace ran; none where it was recalled.
        known: how many further calls were as one of these.
        layers: rows of layers of which some stand for all.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    passes: list[Record] = dataclasses.field(default_factory=list)
    recorded: int = 0
    known: int = 0
    layers: tuple[Layers, ...] = ()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        try:
            with uncollected():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclasses.dataclass
class Compiled:
    """A compiled step: the executable and the graphs it came from.

    Args:
        executable: runs forward and backward.
        forward: the optimized forward graph; a short one where the others were made of it.
        training: the training graph, or a short one; None for inference.
        plan: what the backend compiled.
        report: times and passes.
        tracked: names of the outputs that depend on what is differentiated.
    """

    executable: Executable
    forward: ForwardGraph
    training: TrainingGraph | None
    plan: Plan
    report: Report
    tracked: frozenset[str] = frozenset()

    @property
    def whole_forward(self) -> ForwardGraph:
        """The optimized forward graph of all layers."""
        return whole(self.forward) if self.forward.layers else self.forward

    @functools.cached_property
    def whole_training(self) -> TrainingGraph:
        """The training graph of all layers."""
        assert self.training is not None
        return make_whole(self.training.copy()) if self.training.layers else self.training


def capture_module(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    report: Report,
    numbers: Numbers | None = None,
    answers: Answers | None = None,
) -> Captured:
    """Stage 1: the forward pass of a module as an optimized graph, ready to be differentiated any number of times."""
    capture = _Capture(module, args, kwargs, options, report, numbers, answers)
    try:
        return capture.optimized(is_whole=options.save_onnx is not None)
    except NotRepeatedError as error:
        _LOG.info("all layers are captured: %s", error)
        return capture.optimized(is_whole=True)


@dataclasses.dataclass(frozen=True)
class _Capture:
    """The capture of a call: recalled from the cache, or traced and translated, then optimized."""

    module: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Options
    report: Report
    numbers: Numbers | None
    answers: Answers | None

    def optimized(self, is_whole: bool) -> Captured:
        """The captured call; of layers that are alike only some are traced, unless all are asked for.

        Raises:
            NotRepeatedError: the layers of which only some were captured are not alike in the graph.
        """
        captured = self._captured(is_whole)
        graph, options, report = captured.graph, self.options, self.report
        with report.stage("gradient"):
            write_out_inner(graph)
        _dump(options, "torch_exported", "training" if self.module.training else "inference", graph.model)
        with report.stage("optimize"):
            graph.signature = dataclasses.replace(graph.signature, origins=origins_of_outputs(graph))
            report.passes += optimize(graph, options, check=options.verify_passes)
            report.layers = graph.layers
            return dataclasses.replace(captured, graph=whole(graph)) if graph.layers else captured

    def _captured(self, is_whole: bool) -> Captured:
        """The call as an earlier process kept it, or as it is traced now."""
        from onnxtrain.capture import is_spot_check

        cache = graph_cache(self.options)
        start = None if cache is None else self._start(cache)
        captured = None if start is None else start.recalled(is_whole)
        if captured is None or self.options.cache_verify or is_spot_check():
            traced, fresh = self._traced(cache, is_whole)
            if start is not None:
                start.keep(fresh, traced, captured)
            captured = fresh
        return captured

    def _start(self, cache: GraphCache) -> Start | None:
        """What the call reads, by which an earlier process may have kept its graph; None where it is not asked."""
        from onnxtrain.capture import start_of

        if self.numbers or self.answers is None or self.answers.rehearsed:
            return None
        options, (_, stops) = self.options, registered_by_users()
        settings = (options.opset, options.static_shapes, options.backend, _functions(options), *stops)
        with self.report.stage("recall"):
            return start_of(self.module, self.args, self.kwargs, cache, settings, options.ignored_attributes)

    def _traced(self, cache: GraphCache | None, is_whole: bool) -> tuple[Traced, Captured]:
        """The call, traced and translated: again where the translation asked what a size of 1 answers otherwise."""
        from onnxtrain.capture import translate

        options, report, (_, stops) = self.options, self.report, registered_by_users()
        constant: frozenset[Axis] = frozenset()
        while True:
            with report.stage("export"):
                traced = self._trace(constant, is_whole)
            count = traced.flat.result.recorded
            report.recorded, report.known = count.recorded, count.known
            with report.stage("translate"):
                captured = translate(
                    traced, opset=options.opset, cache=cache, refusals=_refusals(options), decisive=stops
                )
            is_whole = not traced.layers
            if not (broken := captured.guards.broken_by(traced.sizes)):
                return traced, captured
            constant |= broken

    def _trace(self, constant: frozenset[Axis], is_whole: bool) -> Traced:
        from onnxtrain.capture import trace

        options = self.options
        return trace(
            *(self.module, self.args, self.kwargs),
            static_shapes=options.static_shapes,
            constant=constant,
            numbers=self.numbers,
            functions=_functions(options),
            ignored=options.ignored_attributes,
            answers=self.answers,
            short=not is_whole,
        )


def graph_cache(options: Options) -> GraphCache | None:
    """Where graphs are kept; None where they are not."""
    from onnxtrain.capture import GraphCache

    if options.cache_dir is None:
        return None
    rules, _ = registered_by_users()
    if rules:
        _LOG.info("the graph is not kept: the gradient rules of %s decide on it", ", ".join(map("::".join, rules)))
        return None
    return GraphCache(options.cache_dir, options.cache_limit)


def _functions(options: Options) -> Functions:
    from onnxtrain.capture import Functions

    return Functions(options.custom_autograd, options.keep_checkpoints)


def _refusals(options: Options) -> Callable[[ForwardGraph], list[ir.Node]] | None:
    """The nodes that the stages after capture cannot take; None where the backend cannot take ATen nodes instead."""
    chosen = backend(options.backend)
    if not chosen.runs_aten:
        return None

    def refused(graph: ForwardGraph) -> list[ir.Node]:
        nodes = graph.model.graph
        odd = [n for n in nodes if not (chosen.runs(n) or is_further(n)) or _draws_otherwise(n)]
        found = [*invalid(nodes), *odd, *undifferentiable(graph)]
        return [n for n in found if not is_inner_gradient(n)]

    return refused


def _draws_otherwise(node: ir.Node) -> bool:
    """Whether a node takes random numbers from torch's generator in another way than the call it translates."""
    return node.domain == "" and node.op_type != "Dropout" and Trait.RANDOM in traits_of(node)


def compile_graph(
    graph: ForwardGraph,
    differentiable: Sequence[str],
    outputs: Sequence[str],
    options: Options,
    report: Report,
    device: str = "cpu",
    gathering: Gathering | None = None,
) -> Compiled:
    """Stages 2 to 5: differentiate, plan and compile a forward graph.

    Args:
        graph: an optimized forward graph, or a short one, of which the whole is compiled; it is not changed.
        differentiable: parameters and user inputs whose gradient is wanted; none compiles for inference.
        outputs: the outputs that will receive a gradient.
        options: backend and checks.
        report: receives times and passes.
        device: where the executable runs.
        gathering: of parameters that are not whole.

    Raises:
        NotRepeatedError: the layers of a short graph turn out not to be alike.
        BackendError: there are parameters to be gathered, and the backend gathers none.
    """
    mode = "training" if differentiable else "inference"
    training, chosen = None, differentiated(graph, short_names(differentiable, graph.layers))
    if differentiable:
        # saved before the gradient is built, so that a failure there leaves something to look at
        _dump(options, "optimized_pre_grad", mode, graph.model)
        with report.stage("gradient"):
            training = _training_graph(chosen, outputs, options, report, device)
    _dump(options, "optimized", mode, (training or graph).model)
    plan = _plan_of(graph, training, gathering, options, report)
    with report.stage("compile"):
        executable = backend(options.backend).compiled(plan, device, options)
    return Compiled(executable, graph, training, plan, report, frozenset(tracked_outputs(chosen)))


def _training_graph(
    graph: ForwardGraph, outputs: Sequence[str], options: Options, report: Report, device: str
) -> TrainingGraph:
    """The optimized training graph; a short one where nothing is to see all layers."""
    training = dataclasses.replace(build_gradient(graph, outputs), layers=graph.layers)
    report.passes += optimize_training(training, check=options.verify_passes)
    if options.cache_casts or registered_for(device):
        training = make_whole(training)
        apply_registered(training, device)
    if options.cache_casts:
        hoist_casts(training)
    return training


def _plan_of(
    graph: ForwardGraph,
    training: TrainingGraph | None,
    gathering: Gathering | None,
    options: Options,
    report: Report,
) -> Plan:
    """The plan of all layers of a training graph; of the forward graph where there is none."""
    with report.stage("plan"):
        if training is None:
            plan = make_plan(whole(graph) if graph.layers else graph)
        else:
            plan = partition(_of_shards(make_whole(training.copy()), gathering))
    plan.gathering, mode = gathering, "inference" if training is None else "training"
    _dump(options, "execution_model", mode, plan.forward)
    if plan.backward is not None:
        _dump(options, "execution_model_backward", mode, plan.backward)
    return plan


def replanned(compiled: Compiled, chosen: Sequence[Choice], folder: str = "") -> tuple[TrainingGraph, Plan]:
    """The training graph of a compiled step with values that are computed again or wait elsewhere, and its plan.

    Args:
        compiled: the step as it computes nothing again.
        chosen: which values.
        folder: where those are that wait; empty for memory of the host.
    """
    training = recomputed(compiled.whole_training, compiled.plan, chosen, folder)
    gathering = compiled.plan.gathering
    training = _of_shards(training, gathering)
    return training, dataclasses.replace(make_plan(training), gathering=gathering)


def _of_shards(training: TrainingGraph, gathering: Gathering | None) -> TrainingGraph:
    """The training graph that saves no views of parameters in shards: their memory is given back between the passes."""
    return training if gathering is None else views_again(training, frozenset().union(*gathering.shards.groups))


def recompile(compiled: Compiled, chosen: Sequence[Choice], options: Options, device: str) -> Compiled:
    """A compiled step that gives the same and saves less for its backward pass.

    Args:
        compiled: the step as it computes nothing again.
        chosen: which values are computed again.
        options: backend and checks.
        device: where the executable runs.
    """
    training, plan = replanned(compiled, chosen, options.offload_folder)
    executable = backend(options.backend).compiled(plan, device, options)
    return dataclasses.replace(compiled, executable=executable, training=training, plan=plan)


def differentiated(graph: ForwardGraph, differentiable: Sequence[str]) -> ForwardGraph:
    """A graph with other inputs whose gradient is wanted."""
    signature: Signature = dataclasses.replace(graph.signature, differentiable=tuple(differentiable))
    return dataclasses.replace(graph, signature=signature)


def backward_graph(
    graph: ForwardGraph, differentiable: Sequence[str], outputs: Sequence[str], options: Options, report: Report
) -> tuple[ForwardGraph, TrainingGraph]:
    """The backward pass as a forward graph like any other, to be differentiated again; and what it was made of.

    Args:
        graph: an optimized forward graph; it is not changed.
        differentiable: parameters and user inputs whose gradients are its outputs.
        outputs: the outputs whose gradients are its last inputs.
        options: what passes leave to choose.
        report: receives times and passes.
    """
    with report.stage("gradient"):
        training = build_gradient(differentiated(graph, differentiable), outputs)
        made = gradients_as_outputs(training)
        report.passes += optimize(made, options, check=options.verify_passes)
    return made, training


def _dump(options: Options, stage: str, mode: str, model: ir.Model) -> None:
    if options.save_onnx is not None:
        parts = (options.onnx_prefix, stage, mode)
        save(model, options.save_onnx / ("_".join(filter(None, parts)) + ".onnx"))
