"""Outputs of a step that are computed after it, when they are read."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import torch

from onnxtrain.engine import randomness
from onnxtrain.engine.deferred import DeferredTensor
from onnxtrain.engine.node import begin_backward
from onnxtrain.engine.state import State
from onnxtrain.engine.tensors import as_torch
from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import size_of

_LOG = logging.getLogger(__name__)


class Late:
    """Outputs of a step that are computed after it, when they are read.

    Args:
        state: the step.
    """

    def __init__(self, state: State) -> None:
        self.bound, self.differentiable, self.random = state.bound, state.differentiable, state.random
        self.inputs = state.read  # buffers with their content before the step
        self._sources = state.sources
        self.versions = [x._version for x in self.inputs.values()]
        self._outputs: dict[str, torch.Tensor] = {}

    def deferred(self, name: str) -> torch.Tensor:
        """An output that is computed when it is read, and whose gradient goes to the sources."""
        bound = self.bound
        value = next(v for v in bound.graph.model.graph.outputs if v.name == name)
        sizes = bound.sizes.of(self.inputs)
        shape = [size_of(d, sizes) for d in shapes.known_dims(value)]
        dtype, device = torch_dtype(int(shapes.dtype_of(value))), next(iter(self.inputs.values())).device
        tracked = bound.is_tracked(name, self.differentiable)
        return DeferredTensor(shape, dtype, device, tracked, functools.partial(self.value, name))

    def value(self, name: str) -> torch.Tensor:
        """One output, as eager computes it in all its rows; a gradient flows where gradients are enabled."""
        bound = self.bound
        if name not in bound.read:
            bound.read.add(name)
            place = bound.place_of(name)
            _LOG.info("%s was read: from the next step on it is computed with the loss", place)
            if any(x._version != version for x, version in zip(self.inputs.values(), self.versions, strict=True)):
                warnings.warn(
                    f"{place} was read after parameters or inputs changed, and is computed with what they are now. "
                    "From the next step on it is computed with the loss; Options(lazy_outputs=False) does so always",
                    stacklevel=2,
                )
        if not torch.is_grad_enabled() or not bound.is_tracked(name, self.differentiable):
            return self.outputs()[name]
        return LateStep.apply(self, name, *self._sources.values())

    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs; buffers are not written a second time."""
        if not self._outputs:
            compiled = self.bound.variant((), ())
            with randomness.replayed(self.random or randomness.state()):
                made, _ = compiled.executable.forward(list(self.inputs.values()))
            names = compiled.plan.signature.outputs
            self._outputs = {n: as_torch(v) for n, v in zip(names, made, strict=False)}
        return self._outputs

    def begun(self, name: str) -> State:
        """A step in which this output receives a gradient, its forward pass done; the next step expects it."""
        self.bound.expected.add(name)
        chosen = self.bound.choose(self.inputs, self.differentiable, (name,))
        state = State(self.bound, chosen, self.inputs, self._sources)
        with randomness.replayed(self.random or randomness.state()):
            state.compute()
        return state


class LateStep(torch.autograd.Function):
    """One output after the step; forward and backward run again where it receives a gradient."""

    @staticmethod
    def forward(ctx: Any, late: Late, name: str, *differentiable: torch.Tensor) -> torch.Tensor:
        """The output."""
        ctx.late, ctx.name = late, name
        return late.outputs()[name].clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """A gradient for each of the step's differentiable inputs."""
        state = ctx.late.begun(ctx.name)
        begin_backward(state, [dy if n == ctx.name else None for n in state.outputs])
        return (None, None, *state.rest().values())
