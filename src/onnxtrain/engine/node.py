"""A step as nodes of autograd: one, or one for each part of its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.engine import randomness
from onnxtrain.engine.bound import BoundGraph
from onnxtrain.engine.state import State
from onnxtrain.errors import GradientError


def begin(
    bound: BoundGraph, inputs: dict[str, torch.Tensor], differentiable: Sequence[str]
) -> tuple[State, dict[str, torch.Tensor]]:
    """Run the forward pass of a step; its state, and the outputs by name, through which gradients flow.

    Args:
        bound: the graph.
        inputs: all its inputs by name.
        differentiable: names of those that require a gradient.
    """
    chosen = bound.choose(inputs, differentiable, bound.expected.names)
    state = State(bound, chosen, inputs, {name: inputs[name] for name in differentiable})
    link = None
    for index in range(len(state.parts) - 1, 0, -1):
        link = LaterPart.apply(state, index, link, *state.sources_of(index))
    made = Step.apply(state, link, *state.sources_of(0))
    return state, dict(zip(state.outputs, made, strict=True))


class Step(torch.autograd.Function):
    """Forward of a graph, and the first part of its backward."""

    @staticmethod
    def forward(
        ctx: Any, state: State, link: torch.Tensor | None, *differentiable: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of the graph."""
        outputs = state.forward()
        ctx.state = state
        ctx.set_materialize_grads(False)
        named = zip(state.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(t for name, t in named if name not in state.compiled.tracked))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """A gradient for each differentiable input of the part."""
        begin_backward(ctx.state, dys)
        return (None, None, *ctx.state.take(0))


class LaterPart(torch.autograd.Function):
    """A later part of the backward of a graph, which is linked to the one before by a tensor without content.

    So autograd has the gradients of one part, and calls the hooks on them, before it asks for the next.
    """

    @staticmethod
    def forward(
        ctx: Any, state: State, index: int, link: torch.Tensor | None, *differentiable: torch.Tensor
    ) -> torch.Tensor:
        """The link; the parts are created from the last one to the first."""
        ctx.state, ctx.index = state, index
        ctx.set_materialize_grads(False)
        return differentiable[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """A gradient for each differentiable input of the part."""
        return (None, None, None, *ctx.state.take(ctx.index))


def begin_backward(state: State, dys: Sequence[torch.Tensor | None]) -> None:
    """Begin the backward pass of a step; its gradients are taken part by part.

    With ``create_graph=True`` they are such as can be differentiated.

    Args:
        state: the step.
        dys: gradients of its outputs.

    Raises:
        GradientError: a tensor that the backward pass needs has changed, or there are several gradients at once.
    """
    _refuse_batched(dys)
    if not torch.is_grad_enabled():
        state.begin_backward(dys)
        return
    try:  # create_graph=True
        state.give(_differentiable(state, dys))
    except GradientError as error:
        with torch.no_grad():
            state.begin_backward([None if dy is None else dy.detach() for dy in dys])
            made = state.rest()
        anchor = torch.empty(0, requires_grad=True)
        state.give({n: None if dx is None else _Once.apply(error, anchor, dx) for n, dx in made.items()})


def _differentiable(state: State, dys: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Gradients of a step whose backward pass runs as a step of its own.

    Raises:
        GradientError: an operator on the way has no second derivative, or a tensor that this needs has changed.
    """
    given = state.received(dys)
    backward = state.bound.backward(state.differentiable, tuple(given))
    inputs = state.read | state.sources
    inputs |= {name: given[output] for output, name in backward.output_gradients.items()}
    with randomness.replayed(state.random or randomness.state()):
        _, made = begin(backward.bound, inputs, backward.bound.differentiable_of(inputs))
    found, reached = (
        {name: made.get(backward.gradients.get(name, "")) for name in state.differentiable},
        state.bound.reached(given),
    )
    return {n: torch.zeros_like(inputs[n]) if dx is None and n in reached else dx for n, dx in found.items()}


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again: the error is raised where somebody does."""

    @staticmethod
    def forward(ctx: Any, error: GradientError, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.error = error
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        raise ctx.error


def _refuse_batched(dys: Sequence[torch.Tensor | None]) -> None:
    """Raise GradientError where several gradients come as one: a graph's backward pass is for one."""
    known = torch._C._functorch
    if any(known.is_batchedtensor(dy) or known.is_legacy_batchedtensor(dy) for dy in dys if dy is not None):
        raise GradientError(
            "several gradients were asked for at once (vectorize=True, is_grads_batched=True, torch.func.vmap)",
            cure="ask for one after the other: vectorize=False; or differentiate the wrapped module, model.module",
        )
