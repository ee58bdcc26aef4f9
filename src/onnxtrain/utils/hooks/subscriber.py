"""SubscriberBase: what a subscriber may override; RuntimeStates: what it is told of the step."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch


@dataclasses.dataclass
class GlobalStates:
    """What holds for all modules of a subscription.

    Args:
        execution_step: number of the step that is running, from 0.
    """

    execution_step: int = 0


@dataclasses.dataclass(frozen=True)
class RuntimeStates:
    """Where in the training a subscriber is called; in the backward pass it is the step of the forward pass.

    Args:
        global_states: the step.
        name: class and index of the module, ``BertLayer_3``; the same for eager PyTorch and for ORTModule.
        call: how often the module was called before in the step.
    """

    global_states: GlobalStates
    name: str = ""
    call: int = 0


class SubscriberBase:
    """Watches the calls of a module and of all modules within it; override the ``_impl`` methods you need.

    The ``tensor`` methods are called at run time with real tensors, in each step and each direction, on plain modules
    and on ORTModule alike; they observe, and return the tensor they were given. The ``module`` methods are called
    where the module's Python runs, and may return other arguments or outputs: in every call of a plain module, and
    of the outmost module; on ORTModule once for each module within, at capture, with what they compute becoming part
    of the graph.

    Args:
        start_step: the first step to watch; None is 0.
        end_step: the step to stop before; None is never.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = sys.maxsize if end_step is None else end_step

    @property
    def is_limited(self) -> bool:
        """Whether some steps are not watched."""
        return self._start_step > 0 or self._end_step < sys.maxsize

    def watches(self, states: RuntimeStates) -> bool:
        """Whether the step is within the limits."""
        return self._start_step <= states.global_states.execution_step < self._end_step

    def pre_forward_outmost_module_apply(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Before the outmost module's forward."""
        if not self.watches(states):
            return args, kwargs
        return self.pre_forward_outmost_module_apply_impl(states, module, args, kwargs)

    def pre_forward_outmost_module_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Override: returns the arguments to call with."""
        return args, kwargs

    def pre_forward_module_apply(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Before each module's forward."""
        if not self.watches(states):
            return args, kwargs
        return self.pre_forward_module_apply_impl(states, module, args, kwargs)

    def pre_forward_module_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Override: returns the arguments to call with."""
        return args, kwargs

    def pre_forward_tensor_apply(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """The index-th tensor among the arguments, before each module's forward."""
        return self.pre_forward_tensor_apply_impl(states, module, index, tensor) if self.watches(states) else tensor

    def pre_forward_tensor_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Override: observes a tensor."""
        return tensor

    def post_forward_tensor_apply(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """The index-th tensor among the outputs, after each module's forward."""
        return self.post_forward_tensor_apply_impl(states, module, index, tensor) if self.watches(states) else tensor

    def post_forward_tensor_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Override: observes a tensor."""
        return tensor

    def pre_backward_tensor_apply(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """The gradient of the index-th output, before the module's backward."""
        return self.pre_backward_tensor_apply_impl(states, module, index, gradient) if self.watches(states) else None

    def pre_backward_tensor_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Override: observes a gradient."""
        return gradient

    def post_backward_tensor_apply(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """The gradient of the index-th argument, after the module's backward."""
        return self.post_backward_tensor_apply_impl(states, module, index, gradient) if self.watches(states) else None

    def post_backward_tensor_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, index: int, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Override: observes a gradient."""
        return gradient

    def post_forward_module_apply(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """After each module's forward."""
        if not self.watches(states):
            return args, outputs
        return self.post_forward_module_apply_impl(states, module, args, outputs)

    def post_forward_module_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """Override: returns the arguments and the outputs to go on with."""
        return args, outputs

    def post_forward_outmost_module_apply(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """After the outmost module's forward; the step ends with it."""
        if not self.watches(states):
            return args, outputs
        return self.post_forward_outmost_module_apply_impl(states, module, args, outputs)

    def post_forward_outmost_module_apply_impl(
        self, states: RuntimeStates, module: torch.nn.Module, args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """Override: returns the arguments and the outputs to go on with."""
        return args, outputs

    def inspect_activation_apply(self, states: RuntimeStates, tensor: torch.Tensor) -> None:
        """Override: a tensor at a point marked by ``inspect_activation``; the point's name is ``states.name``."""

    def inspect_gradient_apply(self, states: RuntimeStates, gradient: torch.Tensor) -> None:
        """Override: the gradient at a point marked by ``inspect_activation``."""


def overrides(subscriber: SubscriberBase, *methods: str) -> bool:
    """Whether a subscriber's class has its own version of one of these methods, or of its ``_impl``."""
    names = [name + suffix for name in methods for suffix in ("", "_impl")]
    return any(getattr(type(subscriber), n) is not getattr(SubscriberBase, n) for n in names)
