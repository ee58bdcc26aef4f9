"""One training step inside autograd: forward and backward of a graph as one node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.engine.bound import BoundGraph, Chosen
from onnxtrain.engine.late import Late
from onnxtrain.engine.sparsity import density_table, step_line
from onnxtrain.engine.state import State, finish, on_its_path
from onnxtrain.errors import GradientError

_LOG = logging.getLogger(__name__)


def run(bound: BoundGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph on the user's tensors; the outputs carry gradients where any input or parameter requires one."""
    inputs = bound.inputs(tensors)
    differentiable = bound.differentiable(inputs)
    named = dict(zip(bound.signature.inputs, inputs, strict=True))
    if not differentiable:
        chosen = bound.choose(named, (), ())
        forward = chosen.compiled.executable.forward
        outputs = on_its_path(bound, chosen.compiled, inputs, lambda: forward([*inputs, *chosen.rows])[0])
        return finish(bound, chosen.compiled, outputs)
    bound.exact = bound.is_unverified and bound.is_random
    chosen = bound.choose(named, differentiable, bound.expected.names)
    state = State(bound, chosen, named, differentiable)
    made = _Step.apply(state, *(named[name] for name in differentiable))
    _report(bound, chosen, named)
    found = dict(zip(state.compiled.plan.signature.outputs, made, strict=True))
    if not state.chosen.waiting:
        return list(found.values())
    late = Late(state, [named[name] for name in differentiable])
    return [found[n] if n in found else late.deferred(n) for n in bound.signature.outputs]


def _report(bound: BoundGraph, chosen: Chosen, inputs: dict[str, torch.Tensor]) -> None:
    """Say what the step skips, where that is asked for."""
    bound.steps += 1
    talks = _LOG.isEnabledFor(logging.INFO)
    if talks or bound.steps == 1:
        bound.latest_work = bound.work(chosen, inputs)
    if talks:
        _LOG.info("step %d: %s", bound.steps, step_line(chosen, bound.latest_work))
    if bound.options.print_input_density and bound.latest_choice is not None and chosen.batch.held:
        print(density_table(bound.steps, bound.latest_choice[1], chosen.batch, bound.sizes.of(inputs)))


class _Step(torch.autograd.Function):
    """The module's forward and backward as one autograd node."""

    @staticmethod
    def forward(ctx: Any, state: State, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = state.forward()
        ctx.state = state
        ctx.set_materialize_grads(False)
        named = zip(state.compiled.plan.signature.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(t for name, t in named if name not in state.compiled.tracked))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = ctx.state.backward([None if dy is None else dy.detach() for dy in dys])
        if torch.is_grad_enabled():  # create_graph=True: say so where the second backward arrives
            anchor = torch.empty(0, requires_grad=True)
            gradients = [None if g is None else _Once.apply(anchor, g) for g in gradients]
        return (None, *gradients)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        raise GradientError(
            "double backward: the gradient that ORTModule computed was differentiated again",
            cure="run the module whose gradient is differentiated (a gradient penalty) in eager PyTorch: model.module",
        )
