"""The probe: an identity that tells an observer what passes, in eager PyTorch and as a node of a captured graph."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from onnxtrain.execute.torch.effects import is_silent

Visit: TypeAlias = tuple[int, int]
"""The step, and how often the probe was passed before in that step."""


class Observer(Protocol):
    """What a probe tells of the tensors that pass it, at run time and with real tensors."""

    def forward(self, tensor: torch.Tensor) -> None:
        """A value passes in the forward pass."""
        ...

    def backward(self, gradient: torch.Tensor, visit: Visit) -> None:
        """The gradient of the value that passed at a visit passes in the backward pass."""
        ...

    def visit(self) -> Visit:
        """The visit that is going on."""
        ...


_UNSEEN: Visit = (-1, 0)  # what nobody observed in the forward pass, nobody observes in the backward pass
_OBSERVERS: dict[str, Observer] = {}  # a graph can hold only the name of an observer


def register(handle: str, observer: Observer) -> None:
    """Let an observer be told what passes the probes with this handle; it replaces the one before."""
    _OBSERVERS[handle] = observer


def unregister(handle: str) -> None:
    """Probes with this handle are plain identities from now on, in graphs already captured too."""
    _OBSERVERS.pop(handle, None)


def probe(tensor: torch.Tensor, handle: str) -> torch.Tensor:
    """The tensor itself, by way of a probe."""
    return _probe(tensor, handle)[0]


@torch.library.custom_op("onnxtrain::probe", mutates_args=(), schema="(Tensor x, str handle) -> (Tensor, Tensor)")
def _probe(x: torch.Tensor, handle: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy, as custom operators may not return their inputs; and the visit, for the backward pass."""
    observer = _OBSERVERS.get(handle)
    visit = _UNSEEN if observer is None or is_silent() else _pass(observer, x.detach())
    return x.clone(), torch.tensor(visit)


def _pass(observer: Observer, tensor: torch.Tensor) -> Visit:
    """Tell an observer, unless the backward pass only runs a part of the forward pass again (a checkpoint)."""
    step, call = observer.visit()
    if torch._C._current_graph_task_id() >= 0:
        return step, max(0, call - 1)
    observer.forward(tensor)
    return step, call


@torch.library.custom_op(
    "onnxtrain::probe_backward", mutates_args=(), schema="(Tensor dy, Tensor visit, str handle) -> Tensor"
)
def _probe_backward(dy: torch.Tensor, visit: torch.Tensor, handle: str) -> torch.Tensor:
    observer, (step, call) = _OBSERVERS.get(handle), visit.tolist()
    if observer is not None and (step, call) != _UNSEEN:
        observer.backward(dy.detach(), (step, call))
    return dy.clone()


@_probe.register_fake
def _(x: torch.Tensor, handle: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty(2, dtype=torch.int64, device="cpu")


@_probe_backward.register_fake
def _(dy: torch.Tensor, visit: torch.Tensor, handle: str) -> torch.Tensor:
    return torch.empty_like(dy)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """An attribute, not a saved tensor: a checkpoint that runs the forward pass again must not replace it."""
    ctx.handle, ctx.visit = inputs[1], output[1]


def _gradient(ctx: Any, dy: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor, None]:
    return _probe_backward(dy, ctx.visit, ctx.handle), None


def _second_gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return dy, None, None


_probe.register_autograd(_gradient, setup_context=_keep)
_probe_backward.register_autograd(_second_gradient)
for _operator in (torch.ops.onnxtrain.probe.default, torch.ops.onnxtrain.probe_backward.default):
    torch.fx.node.has_side_effect(_operator)  # torch.export keeps probes whose result nobody reads
