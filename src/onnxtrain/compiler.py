"""The spine: capture → optimize → gradient → plan → execute, one line per stage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onnxtrain.execute import Executable, backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature, TrainingGraph
from onnxtrain.ir.passes import Record, save
from onnxtrain.optimize import optimize, optimize_training
from onnxtrain.options import Options
from onnxtrain.plan import make_plan

if TYPE_CHECKING:
    from onnxtrain.capture import Captured


@dataclasses.dataclass
class Report:
    """What a compilation did.

    Attributes:
        seconds: time of each stage.
        passes: what each pass did.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    passes: list[Record] = dataclasses.field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclasses.dataclass
class Compiled:
    """A compiled step: the executable and the graphs it came from.

    Args:
        executable: runs forward and backward.
        forward: the optimized forward graph.
        training: the training graph; None for inference.
        plan: what the backend compiled.
        report: times and passes.
    """

    executable: Executable
    forward: ForwardGraph
    training: TrainingGraph | None
    plan: Plan
    report: Report


def capture_module(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, report: Report
) -> Captured:
    """Stage 1: the forward pass of a module as an optimized graph, ready to be differentiated any number of times."""
    from onnxtrain.capture import capture

    with report.stage("capture"):
        captured = capture(module, args, kwargs, opset=options.opset)
    _dump(options, "captured", captured.graph)
    with report.stage("optimize"):
        report.passes += optimize(captured.graph, check=options.verify_passes)
    _dump(options, "optimized", captured.graph)
    return captured


def compile_graph(
    graph: ForwardGraph,
    differentiable: Sequence[str],
    outputs: Sequence[str],
    options: Options,
    report: Report,
    device: str = "cpu",
) -> Compiled:
    """Stages 2 to 5: differentiate, plan and compile a forward graph.

    Args:
        graph: an optimized forward graph; it is not changed.
        differentiable: parameters and user inputs whose gradient is wanted; none compiles for inference.
        outputs: the outputs that will receive a gradient.
        options: backend and checks.
        report: receives times and passes.
        device: where the executable runs.
    """
    training = None
    if differentiable:
        with report.stage("gradient"):
            training = build_gradient(_with(graph, differentiable), outputs)
            report.passes += optimize_training(training, check=options.verify_passes)
        _dump(options, "training", training)
    with report.stage("plan"):
        plan = make_plan(training or graph)
    with report.stage("compile"):
        executable = backend(options.backend).compile(plan, device)
    return Compiled(executable, graph, training, plan, report)


def _with(graph: ForwardGraph, differentiable: Sequence[str]) -> ForwardGraph:
    signature: Signature = dataclasses.replace(graph.signature, differentiable=tuple(differentiable))
    return ForwardGraph(graph.model, signature)


def _dump(options: Options, stage: str, graph: ForwardGraph | TrainingGraph) -> None:
    if options.save_onnx is not None:
        save(graph.model, options.save_onnx / f"{options.onnx_prefix}{stage}.onnx")
