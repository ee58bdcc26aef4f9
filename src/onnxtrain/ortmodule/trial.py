"""verify: one training step of a module beside eager PyTorch's, on a copy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from onnxtrain.capture import arguments_of, flatten
from onnxtrain.engine import randomness
from onnxtrain.engine.comparison import Report
from onnxtrain.errors import ModuleError
from onnxtrain.execute.torch.effects import silenced
from onnxtrain.options import Options
from onnxtrain.ortmodule.module import ORTModule
from onnxtrain.ortmodule.verification import unshared


def verify(model: torch.nn.Module, batch: Any, *, backend: str = "auto") -> Report:
    """Compare one training step through the graph with eager PyTorch; neither the model nor its buffers change.

    The loss is the sum of the scalar outputs, or of all floating outputs where there is no scalar.

    Args:
        model: a module, or an ORTModule.
        batch: a mapping is passed as keyword arguments, a tuple or list as positional ones, else one argument.
        backend: the backend to check; an ORTModule keeps its own.

    Returns:
        A report: print it, or ask for its ``worst`` comparison.

    Raises:
        VerificationError: loss, an output, a gradient or a buffer is out of tolerance; the message names the worst.
        ModuleError: it is not a module, or a sharded one.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModuleError(
            f"verify needs a torch.nn.Module, not a {type(model).__name__}", cure="pass the module itself"
        )
    options = model.options if isinstance(model, ORTModule) else Options(backend=backend)
    inner = model.module if isinstance(model, ORTModule) else model
    wrapped = ORTModule(unshared(inner), options=dataclasses.replace(options, verify=True))
    args, kwargs = arguments_of(batch)
    with randomness.replayed(randomness.state()), torch.enable_grad(), silenced():
        outputs, _ = flatten(wrapped(*args, **kwargs), "output")
        floating = [y for y in outputs if y.requires_grad]
        scalars = [y for y in floating if y.dim() == 0]
        chosen = scalars or floating
        if chosen:
            torch.autograd.backward([y.sum() for y in chosen])
    assert wrapped.verification is not None
    return wrapped.verification
