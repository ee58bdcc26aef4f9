"""Optimizers: Adam in a few kernels, schedules of its rate, and updates within the backward pass."""

from __future__ import annotations

import torch

from onnxtrain.errors import OptimizerError
from onnxtrain.optim.clipping import guard_clipping
from onnxtrain.optim.fp16_optimizer import FP16_Optimizer
from onnxtrain.optim.fused_adam import AdamWMode, FusedAdam
from onnxtrain.optim.stepper import StepInBackward, parameters_of, stepper_of
from onnxtrain.optim.trial import check_apart

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam", "StepInBackward", "step_in_backward"]
CLIPS = ("parameter", "global")


def step_in_backward(
    optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, clip: str = "parameter"
) -> StepInBackward:
    """Make an optimizer update each parameter in the backward pass, when its gradient is there, and free the gradient.

    The training loop stays as it is, ``optimizer.step()``, ``scheduler.step()`` and ``optimizer.zero_grad()`` in it:
    ``step()`` ends the step, and updates only what has a gradient left. Parameters and the optimizer's state are, bit
    for bit, those of the ordinary loop, and ``state_dict()`` has the ordinary form. That each parameter can be updated
    by itself is tried out on small tensors here. A parameter without a gradient is not updated, as after
    ``zero_grad(set_to_none=True)``.

    What needs all gradients at once cannot be: clipping by the norm of all of them after the backward pass, a
    ``GradScaler``, ``DistributedDataParallel``, several backward passes for one step. Each of them is an error, and
    ``accumulate()`` and ``clip`` are what to do instead. Who reads ``.grad`` after the backward pass finds None.

    Args:
        optimizer: any that updates each parameter by itself: all of ``torch.optim`` but ``LBFGS``.
        max_norm: the most that a gradient's norm may be; larger ones are scaled down.
        clip: whose norm that is: each ``"parameter"``'s own, as ``clip_grad_norm_([parameter], max_norm)`` has it; or
            ``"global"``, that of all parameters, for which ``backward(loss)`` of what is returned makes two passes.

    Raises:
        OptimizerError: the optimizer cannot update each parameter by itself, or does so already.
    """
    inner = getattr(optimizer, "optimizer", None)  # accelerate's and Lightning's are around one
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"{type(optimizer).__name__} is no torch.optim.Optimizer", cure="pass the optimizer")
    if clip not in CLIPS:
        raise OptimizerError(f"clip={clip!r} is not known", cure=f"choose one of {', '.join(CLIPS)}")
    if (clip == "global" and max_norm is None) or (max_norm is not None and not max_norm > 0):
        raise OptimizerError(f"max_norm={max_norm} is no norm to clip at", cure="choose a positive number")
    for parameter in parameters_of(optimizer):
        if stepper_of(parameter) is not None:
            raise OptimizerError(
                "a parameter of the optimizer is updated in the backward pass already",
                cure="remove() the earlier one first; a parameter belongs to one of them",
            )
    check_apart(optimizer)
    guard_clipping()
    return StepInBackward(optimizer, max_norm, clip)
