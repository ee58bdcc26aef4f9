"""Measuring a step: what its operators cost, and how much less this machine would need."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from onnxtrain.compiler import Compiled
from onnxtrain.engine import randomness
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.costs import costs_of
from onnxtrain.engine.memory_report import planned
from onnxtrain.engine.path_check import MissedError
from onnxtrain.engine.profile_report import ProfileReport
from onnxtrain.engine.state import before_update
from onnxtrain.engine.step import run
from onnxtrain.errors import ModuleError
from onnxtrain.execute import Timing
from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.execute.torch.speeds import Speeds
from onnxtrain.execute.torch.timing import seconds_of

_SECONDS = 2.0  # of measuring, about
_LEAST, _MOST = 5, 50  # runs


def profile(
    bound: BoundGraph,
    tensors: Sequence[torch.Tensor],
    choose: Callable[[], object],
    optimizer: torch.optim.Optimizer | None = None,
) -> ProfileReport:
    """Measure a step of a graph on the user's tensors, whose parameters, buffers and gradients stay as they are.

    Args:
        bound: the graph.
        tensors: the user's.
        choose: finds the graph for the call.
        optimizer: one to be measured, on copies of its parameters and state.

    Raises:
        BackendError: the backend cannot tell.
        ModuleError: the graph is of another path through the module than the call takes.
    """
    plan = planned(bound, tensors)
    compiled, given, device = plan.fit.compiled, list(plan.inputs.values()), bound.owned.device
    timings, seconds = list[list[Timing]](), list[tuple[float, ...]]()
    calls = choose, functools.partial(_step, bound, tensors, compiled), _update_of(optimizer)
    with _unchanged(bound):
        for _ in _runs():
            seconds.append(tuple(0.0 if call is None else seconds_of(call, device) for call in calls))
            timings.append(compiled.executable.timings(given))
        peak = _peak(bound, calls[1])
    speeds = Speeds(device)
    choosing, step, updating = map(statistics.median, zip(*seconds, strict=True))
    return ProfileReport(
        costs=costs_of(compiled, timings, plan.sizes, speeds),
        step=step,
        choosing=choosing,
        optimizer=None if optimizer is None else updating,
        products=speeds.products,
        bandwidth=speeds.bandwidth,
        sizes=plan.sizes,
        peak=peak,
        work=plan.work,
    )


def _peak(bound: BoundGraph, step: Callable[[], object]) -> int:
    """The peak of a step; what the one before it chose is held meanwhile, lest it be freed within this one."""
    held = bound.latest_choice, bound.latest_step
    try:
        return peak_of(step, torch.device(bound.owned.device))
    finally:
        del held


def _runs() -> Iterator[int]:
    """Runs, until there are enough that their medians do not show the first ones, which warm up."""
    until = time.perf_counter() + _SECONDS
    for count in range(_MOST):
        if count >= _LEAST and time.perf_counter() > until:
            return
        yield count


@contextlib.contextmanager
def _unchanged(bound: BoundGraph) -> Iterator[None]:
    """Buffers and random numbers are afterwards as they were."""
    owned = bound.signature.inputs[len(bound.signature.user_inputs) :]
    contents = before_update(bound, dict(zip(owned, bound.owned.now(), strict=True)))
    try:
        with randomness.replayed(randomness.state()):
            yield
    finally:
        bound.owned.update(list(contents.values()))


def _step(bound: BoundGraph, tensors: Sequence[torch.Tensor], compiled: Compiled) -> None:
    """A step as a call of the module runs it; gradients go nowhere."""
    try:
        outputs = dict(zip(bound.signature.outputs, run(bound, tensors), strict=True))
    except MissedError as error:
        raise ModuleError(
            "the batch takes another path through the module than the graph", cure="call the module with it first"
        ) from error
    losses = [outputs[name] for name in compiled.plan.output_gradients]
    if compiled.plan.backward is None:
        return
    inputs = dict(zip(bound.signature.inputs, bound.inputs(tensors), strict=True))
    sources = [inputs[name] for name in bound.differentiable_of(inputs)]
    torch.autograd.grad(losses, sources, [torch.ones_like(loss) for loss in losses], allow_unused=True)


def _update_of(optimizer: torch.optim.Optimizer | None) -> Callable[[], object] | None:
    """A step of a copy of an optimizer, whose parameters have gradients of zeros; None where there is none."""
    if optimizer is None:
        return None
    copied = copy.deepcopy(optimizer)
    for parameter in itertools.chain.from_iterable(group["params"] for group in copied.param_groups):
        parameter.grad = torch.zeros_like(parameter)
    return copied.step
