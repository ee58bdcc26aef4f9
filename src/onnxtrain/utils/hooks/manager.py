"""SubscriberManager: connects subscribers to modules; inspect_activation: shows them a point within a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxtrain.errors import HookError
from onnxtrain.utils.hooks.probe import Visit, probe, register
from onnxtrain.utils.hooks.subscriber import GlobalStates, RuntimeStates, SubscriberBase
from onnxtrain.utils.hooks.subscription import Subscription


class SubscriberManager:
    """Connects subscribers to modules."""

    def __init__(self) -> None:
        self._made: list[Subscription] = []

    @property
    def subscriptions(self) -> list[Subscription]:
        """Those that have not ended, in order."""
        self._made = [s for s in self._made if s.is_active]
        return self._made

    def subscribe(self, module: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> Subscription:
        """Connect subscribers to a module and all modules within it, plain or wrapped in ORTModule now or later.

        Raises:
            HookError: ``module`` is no module, or one of ``subscribers`` is no SubscriberBase.
        """
        if not isinstance(module, torch.nn.Module):
            raise HookError(f"subscribe needs a torch.nn.Module, not a {type(module).__name__}")
        strangers = [s for s in subscribers if not isinstance(s, SubscriberBase)]
        if strangers:
            raise HookError(f"{type(strangers[0]).__name__} is no subscriber", cure="derive it from SubscriberBase")
        made = Subscription(module, subscribers)
        self._made.append(made)
        return made


GlobalSubscriberManager = SubscriberManager()
_INSPECTED: dict[str, _Inspected] = {}


class _Inspected:
    """A point marked by ``inspect_activation``, shown to the subscribers of the step that runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.subscription: Subscription | None = None  # that of the last forward pass

    def visit(self) -> Visit:
        subscriptions = GlobalSubscriberManager.subscriptions
        running = [s for s in subscriptions if s.started_by]
        self.subscription = ([*subscriptions, *running] or [None])[-1]
        if self.subscription is None:
            return 0, 0
        return self.subscription.step, self.subscription.calls[f"inspect {self.name}"]

    def forward(self, tensor: torch.Tensor) -> None:
        step, call = self.visit()
        if self.subscription is not None:
            for subscriber, states in self._watching((step, call)):
                subscriber.inspect_activation_apply(states, tensor)
            self.subscription.calls[f"inspect {self.name}"] += 1

    def backward(self, gradient: torch.Tensor, visit: Visit) -> None:
        for subscriber, states in self._watching(visit):
            subscriber.inspect_gradient_apply(states, gradient)

    def _watching(self, visit: Visit) -> list[tuple[SubscriberBase, RuntimeStates]]:
        states = RuntimeStates(GlobalStates(visit[0]), self.name, visit[1])
        subscribers = () if self.subscription is None else self.subscription.subscribers
        return [(s, states) for s in subscribers if s.watches(states)]


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, shown to the subscribers of ``GlobalSubscriberManager``, and its gradient in the backward.

    Call it inside a forward method, at a point that is no module's output. Without subscribers it does nothing.
    """
    if not GlobalSubscriberManager.subscriptions:
        return tensor
    handle = f"inspect {name}"
    if name not in _INSPECTED:
        _INSPECTED[name] = _Inspected(name)
        register(handle, _INSPECTED[name])
    return probe(tensor, handle)
