"""One step of a module: what is given, what goes backwards, and what is there to compare afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

Leaf = tuple[str, Any]


@dataclasses.dataclass
class Step:
    """What one step gave: leaves of the output and of the state with their places, gradients by name."""

    kinds: list[tuple[str, str]]
    outputs: list[Leaf]
    gradients: list[Leaf]
    state: list[Leaf]


def leaves(value: Any, place: str = "") -> Iterator[Leaf]:
    """All that is in a structure, with where it is."""
    if isinstance(value, dict):
        for key, held in value.items():
            yield from leaves(held, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, held in enumerate(value):
            yield from leaves(held, f"{place}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{place}.{field.name}")
    else:
        yield place, value


def containers(value: Any) -> list[tuple[str, str]]:
    """The types of a structure, by place."""
    inner: list[tuple[str, str]] = []
    if isinstance(value, dict | list | tuple):
        held = value.values() if isinstance(value, dict) else value
        inner = [pair for v in held for pair in containers(v)]
    name = "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return [(name, ""), *inner]


def take_step(called: Any, module: torch.nn.Module, arguments: Any, loss: str, place: int, moves: bool) -> Step:
    """A call and its backward pass, with arguments of its own."""
    args, kwargs = own(arguments)
    tensors = [(p, v) for p, v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    versions = [v._version for _, v in tensors]
    module.zero_grad()
    output = called(*args, **kwargs)
    backward(output, loss, place)
    outputs = [(p, kept(v)) for p, v in leaves(output)]
    found = [*((n, p.grad) for n, p in module.named_parameters()), *((f"input{p}", v.grad) for p, v in tensors)]
    gradients = [(n, None if g is None else g.detach().clone()) for n, g in found]
    unchanged = [(f"changes of input{p}", v._version - n) for (p, v), n in zip(tensors, versions, strict=True)]
    if moves:
        move(module)
    return Step(containers(output), outputs, gradients, [*state(module), *unchanged])


def own(value: Any) -> Any:
    """A copy of arguments with leaves of its own; strides stay."""
    if isinstance(value, dict):
        return {k: own(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(own(v) for v in value)
    if isinstance(value, torch.Tensor):
        if not value.numel() or 0 in value.stride():
            return value.detach().requires_grad_(value.requires_grad)
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.copy_(value.detach()).detach().requires_grad_(value.requires_grad)
    return value


def kept(value: Any) -> Any:
    """What a value is now; without gradients torch says of a parameter's view that it requires one, and has none."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad and torch.is_grad_enabled())


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
    return torch.stack([part.double() for part in LOSSES[loss](trained, step)]).sum()


def _weights(value: torch.Tensor) -> torch.Tensor:
    ramp = torch.linspace(-1, 2, max(value.numel(), 1), dtype=torch.float64)[: value.numel()]
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
    """Buffers, parameters, and tensors and numbers that are kept on the module itself."""
    noted = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor | int | float) and k != "training"}
    held = {**dict(module.named_parameters()), **dict(module.named_buffers()), **noted}
    return [(name, kept(value)) for name, value in sorted(held.items())]
