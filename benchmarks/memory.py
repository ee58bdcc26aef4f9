"""Variants that trade time for memory: layers that are run again, and budgets of compilers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def checkpointed(model: torch.nn.Module, layer: type[torch.nn.Module] | None) -> torch.nn.Module:
    """A model of which only the inputs of layers are kept for the backward pass.

    Args:
        model: it is changed.
        layer: class of the layers; None where a model of Transformers knows its own.
    """
    if layer is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return model
    for part in model.modules():
        if isinstance(part, layer):
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    return model


def compiled(model: torch.nn.Module, budget: float) -> torch.nn.Module:
    """A model under torch.compile with an ``activation_memory_budget``: 1 keeps everything, 0 as little as it can.

    Args:
        model: to compile.
        budget: share of the activations.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return torch.compile(model, dynamic=True, backend=backend)  # type: ignore[return-value]
