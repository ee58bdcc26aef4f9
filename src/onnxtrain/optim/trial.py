"""Whether an optimizer updates each parameter by itself: tried out on small tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch

from onnxtrain.errors import OptimizerError, first_line
from onnxtrain.optim.views import update_of, view_of

_LONGEST = 64  # the largest size of a parameter that an optimizer is tried on
_GROUPS, _STEPS = 4, 3


def check_apart(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError unless parameters that are updated one by one become what they become together."""
    name, failure = type(optimizer).__name__, None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(f"{name}(differentiable=True) needs its gradients later", cure="use the ordinary loop")
    for keeps, is_sparse in itertools.product((True, False), (False, True)):
        try:
            together, apart = (_tried(optimizer, keeps, is_sparse, alone) for alone in (False, True))
        except Exception as error:  # whatever an optimizer raises for a gradient or a state that is not for it
            failure = failure or error
            continue
        if all(map(torch.equal, together, apart)):
            return
        raise OptimizerError(
            f"{name} does not update each parameter by itself: one by one they become others than together",
            cure="use it in the ordinary loop; it computes something of all parameters or counts its own steps",
        )
    raise OptimizerError(
        f"{name} cannot update each parameter by itself: {first_line(failure or ValueError())}",
        cure="use it in the ordinary loop; all optimizers of torch.optim but LBFGS can",
    ) from failure


def _tried(optimizer: torch.optim.Optimizer, keeps: bool, is_sparse: bool, alone: bool) -> list[torch.Tensor]:
    """Small parameters after some steps.

    Args:
        optimizer: as which they are updated.
        keeps: begin with the state that its parameters have, rather than with none.
        is_sparse: gradients are sparse.
        alone: one by one.
    """
    groups: list[dict[str, Any]] = []
    state: Any = defaultdict(dict)
    for group in optimizer.param_groups[:_GROUPS]:
        small: list[torch.Tensor] = []
        for real in (group["params"] or [])[:1] + (group["params"] or [])[-1:]:
            small.append(_ramp(tuple(real.shape), len(small) + 1.0, real).requires_grad_())
            if keeps and real in optimizer.state:
                state[small[-1]] = {k: _cut(v) for k, v in optimizer.state[real].items()}
        groups.append({**{k: _cut(v) for k, v in group.items() if k != "params"}, "params": small})
    every = [(group, p) for group in groups for p in group["params"]]
    own = {k: _cut(v) for k, v in optimizer.__dict__.items() if isinstance(v, list | dict | set)}
    tried = view_of(optimizer, groups, state)
    tried.__dict__.update(own, param_groups=groups, state=state)
    update = update_of(optimizer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for step in range(1, _STEPS + 1):
            for scale, (_, p) in enumerate(every, 1):
                gradient = _ramp(tuple(p.shape), scale / step, p)
                p.grad = gradient.to_sparse(1) if is_sparse and gradient.dim() else gradient
            for group, p in every if alone else ():
                update(view_of(tried, [{**group, "params": [p]}], state))
                p.grad = None
            update(tried)
    return [p for _, p in every]


def _ramp(shape: tuple[int, ...], most: float, like: torch.Tensor) -> torch.Tensor:
    """A small tensor of numbers from one below zero to one above it."""
    sizes = [min(size, _LONGEST) for size in shape]
    count = int(torch.Size(sizes).numel())
    return torch.linspace(-most / 2, most, count, device=like.device).reshape(sizes).to(like.dtype)


def _cut(value: Any) -> Any:
    """A copy of something of a state, for a small parameter."""
    if isinstance(value, torch.Tensor):
        return value.detach()[tuple(slice(_LONGEST) for _ in value.shape)].clone()
    return type(value)(value) if type(value) in (list, dict, set) else value
