"""One step of a module: what is given, what goes backwards, and what is there to compare afterwards."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fuzz.modules.structures import Leaf, containers, leaves, mapped


@dataclasses.dataclass
class Step:
    """What one step gave: leaves of the output and of the state with their places, gradients by name.

    Args:
        kinds: types of the containers of the output and of what was given.
        outputs: leaves of the output.
        gradients: of parameters and inputs.
        state: what the module keeps, and what was given, afterwards.
        shared: outputs that lie in the memory of something else, each with that.
        ordered: outputs whose elements lie in memory in the order of their axes, with gaps or without.
    """

    kinds: list[tuple[str, str]]
    outputs: list[Leaf]
    gradients: list[Leaf]
    state: list[Leaf]
    shared: frozenset[tuple[str, str]] = frozenset()
    ordered: frozenset[str] = frozenset()


def take_step(called: Any, module: torch.nn.Module, arguments: Any, loss: str, place: int, moves: bool) -> Step:
    """A call and its backward pass, with arguments of its own."""
    args, kwargs = own(arguments)
    tensors = [(p, v) for p, v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    module.zero_grad()
    before = _held(module)
    output = called(*args, **kwargs)
    shared = _shared(output, [*tensors, *_held(module)])
    backward(output, loss, place)
    ordered = frozenset(p for p, v in leaves(output) if _is_ordered(v))
    outputs = [(p, kept(v)) for p, v in leaves(output)]
    found = [*((n, p.grad) for n, p in module.named_parameters()), *((f"input{p}", v.grad) for p, v in tensors)]
    gradients = [(n, None if g is None else g.detach().clone()) for n, g in found]
    given = [(f"given{p}", kept(v)) for p, v in leaves((args, kwargs))]
    past = [(f"held before {p}", kept(v)) for p, v in before if isinstance(v, torch.Tensor)]  # by others, too
    if moves:
        move(module)
    there = [*state(module), *given, *past]
    return Step(containers((output, args, kwargs)), outputs, gradients, there, shared, ordered)


def _shared(output: Any, others: list[Leaf]) -> frozenset[tuple[str, str]]:
    """Pairs of an output and something else that have one memory."""
    made = [(f"output{p}", v) for p, v in leaves(output)]
    plain = [(p, v) for p, v in (*others, *made) if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    lies = [(p, v.untyped_storage()._cdata) for p, v in plain if v.numel()]
    return frozenset((a, b) for i, (a, x) in enumerate(lies) for b, y in lies[:i] if x == y and a.startswith("output"))


def _is_ordered(value: Any) -> bool:
    """Whether it is a tensor in order; one whose elements share memory, as those of windows do, has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    steps = [step for step, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    return not value.numel() or (0 not in steps and steps == sorted(set(steps), reverse=True))


def own(value: Any) -> Any:
    """A copy of arguments with containers and leaves of its own; strides stay."""
    return mapped(value, _own)


def _own(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.numel() or 0 in value.stride():
        return value.detach().requires_grad_(value.requires_grad)
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value.detach()).detach().requires_grad_(value.requires_grad)


def kept(value: Any) -> Any:
    """What a value is now; without gradients torch says of a parameter's view that it requires one, and has none."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad and torch.is_grad_enabled())


_NOTED = torch.Tensor | int | float | str | list | dict | set | collections.deque
LOSSES: dict[str, Callable[[list[torch.Tensor], int], list[torch.Tensor]]] = {
    "weighted": lambda outputs, step: [(y * _weights(y)).sum() for y in outputs],
    "sum": lambda outputs, step: [y.sum() for y in outputs],
    "squares": lambda outputs, step: [y.square().sum() for y in outputs],
    "some": lambda outputs, step: [(y * _weights(y)).sum() for y in outputs[step % len(outputs) :]],
    "first": lambda outputs, step: [outputs[0].sum()],
    "last": lambda outputs, step: [outputs[-1 - step % len(outputs)].sum()],
}


def backward(output: Any, loss: str, step: int) -> None:
    """The backward pass of what in an output requires a gradient."""
    trained = [v for _, v in leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad]
    if trained:
        total(trained, loss, step).backward()


def total(trained: list[torch.Tensor], loss: str, step: int) -> torch.Tensor:
    """The loss of outputs."""
    return torch.stack([part.double().to(trained[0].device) for part in LOSSES[loss](trained, step)]).sum()


def _weights(value: torch.Tensor) -> torch.Tensor:
    ramp = torch.linspace(-1, 2, max(value.numel(), 1), dtype=torch.float64, device=value.device)[: value.numel()]
    return ramp.view(value.shape).to(value.dtype)


def move(module: torch.nn.Module) -> None:
    """A small step of descent."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad.clamp(-1, 1)


def moved(parameter: torch.Tensor) -> None:
    """A small step of descent of one parameter, whose gradient is not kept; hooks may be called where there is none."""
    if parameter.grad is not None:
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad.clamp(-1, 1)
        parameter.grad = None


def state(module: torch.nn.Module) -> list[Leaf]:
    """Buffers, parameters, and what is kept on the module itself: tensors, numbers, and lists and dicts of them."""
    return [(place, kept(v)) for place, v in _held(module)]


def _held(module: torch.nn.Module) -> list[Leaf]:
    own = ((k, v) for k, v in vars(module).items() if isinstance(v, _NOTED) and k != "training" and k[0] != "_")
    noted = {k: _listed(v) for k, v in own}
    held = {**dict(module.named_parameters()), **dict(module.named_buffers()), **noted}
    return [(f"{name}{place}", v) for name, value in sorted(held.items()) for place, v in leaves(value)]


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else [*value] if isinstance(value, collections.deque) else value
