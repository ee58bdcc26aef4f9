"""A call of a graph: with gradients or without, with outputs that wait until somebody reads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from onnxtrain.engine.bound import BoundGraph, Chosen
from onnxtrain.engine.late import Late
from onnxtrain.engine.memory_stats import StepMemory
from onnxtrain.engine.node import begin
from onnxtrain.engine.sparsity import density_table, latest_work, step_line
from onnxtrain.engine.state import before_update, finish, on_its_path

_LOG = logging.getLogger(__name__)


def run(bound: BoundGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph on the user's tensors; the outputs carry gradients where any input or parameter requires one."""
    inputs = bound.inputs(tensors)
    named = dict(zip(bound.signature.inputs, inputs, strict=True))
    differentiable = bound.differentiable_of(named) if torch.is_grad_enabled() else []
    if not differentiable:
        return _untrained(bound, named, tensors)
    bound.exact = bound.is_unverified and bound.is_random
    memory = StepMemory.of(bound)
    state, found = begin(bound, named, differentiable)
    if memory is not None:
        memory.after_forward(state.chosen, state.inputs)
        state.memory = memory
    _report(bound, state.chosen, named)
    if not state.chosen.waiting:
        return list(found.values())
    late = Late(state)
    return [found[n] if n in found else late.deferred(n) for n in bound.signature.outputs]


def _untrained(
    bound: BoundGraph, inputs: dict[str, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """A call of which nothing is differentiated; where gradients are asked for and there are none, it is verified."""
    asked = torch.is_grad_enabled() and bound.is_unverified
    beside = bound.compare(tensors) if asked and bound.compare is not None else None
    bound.exact = beside is not None and bound.is_random
    chosen = bound.choose(inputs, (), ())
    forward, read = chosen.compiled.executable.forward, list((inputs | before_update(bound, inputs)).values())
    outputs = on_its_path(bound, chosen.compiled, read, lambda: forward([*read, *chosen.rows])[0])
    made = finish(bound, chosen.compiled, outputs)
    if beside is not None:
        bound.verification = beside.report
        beside.check_forward(dict(zip(bound.signature.outputs, made, strict=True)), {})
    return made


def _report(bound: BoundGraph, chosen: Chosen, inputs: dict[str, torch.Tensor]) -> None:
    """Say what the step skips, where that is asked for."""
    bound.steps += 1
    bound.latest_step = chosen, bound.sizes.of(inputs)
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("step %d: %s", bound.steps, step_line(chosen, latest_work(bound)))
    if bound.options.print_input_density and bound.latest_choice is not None and chosen.batch.held:
        print(density_table(bound.steps, bound.latest_choice[1], chosen.batch, bound.latest_step[1]))
