"""torch's functions that clip gradients, which would find none."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from onnxtrain.errors import OptimizerError
from onnxtrain.optim.stepper import stepper_of

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


def guard_clipping() -> None:
    """Have torch's functions that clip gradients refuse parameters that were updated already: they find no gradients.

    The one place where functions of torch are changed: what each of them wraps, so that who imported it earlier calls
    the guarded one too. Where nothing is clipped, as by frameworks that log the norm, they go on.
    """
    for name in _FUNCTIONS:
        function: Any = getattr(clip_grad, name, None)
        free: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells: dict[str, Any] = dict(zip(free, getattr(function, "__closure__", None) or (), strict=False))
        if (cell := cells.get("func")) is not None and not hasattr(cell.cell_contents, "is_guarded"):
            cell.cell_contents = _guarded(cell.cell_contents, name)


def _guarded(clip: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(clip)

    @functools.wraps(clip)
    def guarded(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = (p for p in listed) if isinstance(parameters, types.GeneratorType) else listed
        if not any(stepper.was_updated(p) for p in listed if (stepper := stepper_of(p)) is not None):
            return clip(given, *args, **kwargs)
        called = signature.bind(given, *args, **kwargs)
        called.apply_defaults()
        if float(called.arguments.get("max_norm", 0)) != math.inf:
            raise OptimizerError(
                f"{name.strip('_')} finds no gradients: parameters were updated in the backward pass, not clipped",
                cure="leave it out (Trainer: max_grad_norm=0) and say step_in_backward(optimizer, max_norm=...), "
                "with clip='global' for the norm of all",
            )
        return _norm(listed, float(called.arguments["norm_type"])) if "norm_type" in called.arguments else None

    guarded.is_guarded = True  # type: ignore[attr-defined]
    return guarded


def _norm(parameters: Iterable[torch.Tensor], kind: float) -> torch.Tensor:
    """The norm of all gradients, of those that are gone too; not a number the first time that one is asked for."""
    found = []
    for parameter in parameters:
        stepper = stepper_of(parameter)
        if stepper is not None and stepper.was_updated(parameter):
            found.append(stepper.norm_of(parameter, kind))
        elif parameter.grad is not None:
            found.append(torch.nn.utils.get_total_norm([parameter.grad], kind))
    return torch.nn.utils.get_total_norm(found, kind)
