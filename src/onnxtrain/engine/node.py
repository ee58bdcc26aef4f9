"""A step as one node of autograd."""

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
    state = State(bound, chosen, inputs, differentiable)
    made = Step.apply(state, *(inputs[name] for name in differentiable))
    return state, dict(zip(state.outputs, made, strict=True))


class Step(torch.autograd.Function):
    """Forward and backward of a graph."""

    @staticmethod
    def forward(ctx: Any, state: State, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the graph."""
        outputs = state.forward()
        ctx.state, ctx.sources = state, differentiable
        ctx.set_materialize_grads(False)
        named = zip(state.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(t for name, t in named if name not in state.compiled.tracked))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """A gradient for each differentiable input."""
        return (None, *gradients(ctx.state, ctx.sources, dys))


def gradients(
    state: State, sources: Sequence[torch.Tensor], dys: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of a step's differentiable inputs, in order; with ``create_graph=True`` such as can be differentiated.

    Args:
        state: the step.
        sources: its differentiable inputs, as the user has them.
        dys: gradients of its outputs.

    Raises:
        GradientError: a tensor that the backward pass needs has changed, or there are several gradients at once.
    """
    _refuse_batched(dys)
    refused = None
    if torch.is_grad_enabled():  # create_graph=True
        try:
            return _differentiable(state, sources, dys)
        except GradientError as error:
            refused = error
    with torch.no_grad():
        made = state.backward([None if dy is None else dy.detach() for dy in dys])
    if refused is None:
        return made
    anchor = torch.empty(0, requires_grad=True)
    return [None if dx is None else _Once.apply(refused, anchor, dx) for dx in made]


def _differentiable(
    state: State, sources: Sequence[torch.Tensor], dys: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of a step whose backward pass runs as a step of its own.

    Raises:
        GradientError: an operator on the way has no second derivative, or a tensor that this needs has changed.
    """
    given = state.received(dys)
    backward = state.bound.backward(state.differentiable, tuple(given))
    inputs = state.inputs | state.before | dict(zip(state.differentiable, sources, strict=True))
    inputs |= {name: given[output] for output, name in backward.output_gradients.items()}
    with randomness.replayed(state.random or randomness.state()):
        _, made = begin(backward.bound, inputs, backward.bound.differentiable_of(inputs))
    return [made.get(backward.gradients.get(name, "")) for name in state.differentiable]


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
