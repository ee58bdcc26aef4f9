"""Subscription: the hooks of a module and all modules within it, which put probes on what subscribers observe."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from onnxtrain.errors import HookError
from onnxtrain.execute.torch.effects import is_silent
from onnxtrain.utils.hooks.probe import Visit, probe, register, unregister
from onnxtrain.utils.hooks.subscriber import GlobalStates, RuntimeStates, SubscriberBase, overrides

_INPUT = ("pre_forward_tensor_apply", "post_backward_tensor_apply")
_OUTPUT = ("post_forward_tensor_apply", "pre_backward_tensor_apply")
_MODULE = ("pre_forward_module_apply", "post_forward_module_apply")
_OUTMOST = ("pre_forward_outmost_module_apply", "post_forward_outmost_module_apply")
_SERIAL = itertools.count(1)
_SUBSCRIPTIONS: dict[int, Subscription] = {}  # hooks know theirs by number: they are copied and pickled with modules


class _Hook:
    """A hook of one module; a copy of it, made when the module is copied or pickled, does nothing."""

    onnxtrain_traceable = True  # for ORTModule: all that it observes at run time, it observes by nodes of the graph

    def __init__(self, serial: int, name: str = "", is_outmost: bool = False) -> None:
        self.serial, self.name, self.is_outmost = serial, name, is_outmost

    @property
    def is_over(self) -> bool:
        """Whether its subscription has ended, so that it does nothing."""
        return self.serial not in _SUBSCRIPTIONS

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (0,)


class _Before(_Hook):
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        subscription = _SUBSCRIPTIONS.get(self.serial)
        return None if subscription is None else subscription.before(self, module, args, kwargs)


class _After(_Hook):
    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        subscription = _SUBSCRIPTIONS.get(self.serial)
        return None if subscription is None else subscription.after(self, module, args, outputs)


class Subscription:
    """Subscribers connected to a module; ends with ``unsubscribe()``, a ``with`` block, or with the module itself.

    Args:
        module: the outmost module, plain or an ORTModule.
        subscribers: called in this order.

    Attributes:
        states: the step counter; it advances when the outmost module's forward has run.
    """

    def __init__(self, module: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        self.subscribers, self.states = tuple(subscribers), RuntimeStates(GlobalStates())
        self.serial = next(_SERIAL)
        self.started_by = ""  # "call" or "graph" while a step runs: who started it, ends it
        self.calls: collections.Counter[str] = collections.Counter()
        self._probes: dict[str, _Observed | _Border] = {}
        self._hooks: list[Any] = []
        _SUBSCRIPTIONS[self.serial] = self
        for index, part in enumerate(module.modules()):
            self._connect(part, f"{_class_of(part).__name__}_{index}", index == 0)
        self._end = weakref.finalize(module, self.unsubscribe)
        self._end.atexit = False

    def _connect(self, module: torch.nn.Module, name: str, is_outmost: bool) -> None:
        before, after = _Before(self.serial, name, is_outmost), _After(self.serial, name, is_outmost)
        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(after, with_kwargs=True))

    def unsubscribe(self) -> None:
        """Remove the hooks; probes in graphs already captured do nothing from now on."""
        _SUBSCRIPTIONS.pop(self.serial, None)
        self._end.detach()
        for hook in self._hooks:
            hook.remove()
        RemovableHandle(
            collections.OrderedDict()
        )  # counts as a change of hooks, which makes ORTModule look at them again
        for handle in self._probes:
            unregister(handle)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unsubscribe()

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.serial in _SUBSCRIPTIONS

    @property
    def step(self) -> int:
        """The step that runs, or ran last."""
        following = self.states.global_states.execution_step
        return following if self.started_by else max(0, following - 1)

    def start(self, by: str) -> None:
        """The outmost forward begins; within a step that a call started, a graph starts none."""
        if by == "call" or not self.started_by:
            self.started_by = by
            self.calls.clear()

    def finish(self, by: str) -> None:
        """The outmost forward is over: the step counter advances."""
        if by == "graph" and not self.started_by:  # a graph without an input that could have said so
            self.start(by)
        if self.started_by == by:
            self.started_by = ""
            self.states.global_states.execution_step += 1

    def before(self, hook: _Hook, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called by hooks before a module's forward; its arguments, with probes."""
        if torch.compiler.is_exporting():
            self._refuse_limits(_MODULE + _OUTMOST if hook.is_outmost else _MODULE)
        if hook.is_outmost:
            args, kwargs = self._border("start", (args, kwargs))
        states = RuntimeStates(self.states.global_states, hook.name)
        for subscriber in self.subscribers:
            if hook.is_outmost:
                args, kwargs = subscriber.pre_forward_outmost_module_apply(states, module, args, kwargs)
            args, kwargs = subscriber.pre_forward_module_apply(states, module, args, kwargs)
        return self._probed(hook.name, module, "input", (args, kwargs))

    def after(self, hook: _Hook, module: torch.nn.Module, args: Any, outputs: Any) -> Any:
        """Called by hooks after a module's forward; its outputs, with probes."""
        outputs = self._probed(hook.name, module, "output", outputs)
        states = RuntimeStates(self.states.global_states, hook.name)
        for subscriber in self.subscribers:
            args, outputs = subscriber.post_forward_module_apply(states, module, args, outputs)
            if hook.is_outmost:
                args, outputs = subscriber.post_forward_outmost_module_apply(states, module, args, outputs)
        return self._border("finish", outputs) if hook.is_outmost else outputs

    def _refuse_limits(self, methods: tuple[str, ...]) -> None:
        """What runs once, at capture, cannot be limited to some steps."""
        for subscriber in self.subscribers:
            if subscriber.is_limited and overrides(subscriber, *methods):
                raise HookError(
                    f"{type(subscriber).__name__} changes module calls in some steps only, which a graph cannot",
                    cure="leave out start_step and end_step, or override the tensor methods instead",
                )

    def _border(self, side: str, data: Any) -> Any:
        """Start or finish a step: now, or by a node of the graph that is being captured."""
        if torch.compiler.is_exporting():
            return self._place(data, lambda index: _Border(self, side) if index == 0 else None, side)
        if not is_silent():
            getattr(self, side)("call")
        return data

    def _probed(self, name: str, module: torch.nn.Module, side: str, data: Any) -> Any:
        methods = _INPUT if side == "input" else _OUTPUT
        if not any(overrides(s, *methods) for s in self.subscribers):
            return data
        return self._place(data, lambda index: _Observed(self, module, name, index, methods), f"{name} {side}")

    def _place(self, data: Any, observer: Any, place: str) -> Any:
        """The structure with a probe on every tensor that an observer is made for."""
        leaves, spec = pytree.tree_flatten(data)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for index, position in enumerate(places):
            handle = f"{self.serial} {place} {index}"
            if handle not in self._probes and (made := observer(index)) is not None:
                self._probes[handle] = made
                register(handle, made)
            if handle in self._probes:
                leaves[position] = probe(leaves[position], handle)
        return pytree.tree_unflatten(leaves, spec) if places else data


class _Border:
    """Starts or finishes a step when a captured graph gets there; within a larger step it does nothing."""

    def __init__(self, subscription: Subscription, side: str) -> None:
        self.subscription, self.side = subscription, side

    def visit(self) -> Visit:
        return self.subscription.step, 0

    def forward(self, tensor: torch.Tensor) -> None:
        getattr(self.subscription, self.side)("graph")

    def backward(self, gradient: torch.Tensor, visit: Visit) -> None:
        """Steps are counted in the forward pass."""


class _Observed:
    """A module's index-th tensor, shown to all subscribers."""

    def __init__(
        self, subscription: Subscription, module: torch.nn.Module, name: str, index: int, methods: tuple[str, str]
    ) -> None:
        self.subscription, self.module, self.name, self.index = subscription, weakref.ref(module), name, index
        self.methods, self.key = methods, f"{methods[0]} {name} {index}"

    def visit(self) -> Visit:
        return self.subscription.step, self.subscription.calls[self.key]

    def forward(self, tensor: torch.Tensor) -> None:
        self._show(self.methods[0], tensor, self.visit())
        self.subscription.calls[self.key] += 1

    def backward(self, gradient: torch.Tensor, visit: Visit) -> None:
        self._show(self.methods[1], gradient, visit)

    def _show(self, method: str, tensor: torch.Tensor, visit: Visit) -> None:
        states, module = RuntimeStates(GlobalStates(visit[0]), self.name, visit[1]), self.module()
        for subscriber in self.subscription.subscribers:
            made = getattr(subscriber, method)(states, module, self.index, tensor)
            if made is not None and made is not tensor:
                raise HookError(
                    f"{type(subscriber).__name__}.{method} returned another tensor than it was given",
                    cure="tensor methods observe; change values in the module's forward",
                )


def _class_of(module: torch.nn.Module) -> type:
    """The user's class: ORTModule's own is not in the names, so that they are those of eager PyTorch."""
    wrapped = module.__dict__.get("_wrapped")
    return type(module if wrapped is None else wrapped)
