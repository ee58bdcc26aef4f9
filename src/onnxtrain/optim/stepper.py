"""An optimizer that updates each parameter in the backward pass, when its gradient is there."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from onnxtrain.errors import OptimizerError
from onnxtrain.optim.views import update_of, view_of


class StepInBackward:
    """An optimizer that steps within the backward pass; ``step_in_backward`` makes it.

    Args:
        optimizer: the optimizer.
        max_norm: the most that a gradient's norm may be; None clips nothing.
        clip: ``"parameter"`` or ``"global"``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None, clip: str) -> None:
        self.optimizer, self.max_norm, self.clip = optimizer, max_norm, clip
        self._update = update_of(optimizer)
        self._waits = False  # whether gradients are kept for a later backward pass
        self._norms: dict[int, torch.Tensor] | None = None  # while a first pass measures
        self._total: torch.Tensor | None = None  # the norm of all gradients, in the second pass
        self._stepped: dict[int, torch.Tensor | None] = {}  # updated since the last step(), norms where asked for
        self._norm: float | None = None  # the kind of norm that is asked for after backward passes
        self._handles: dict[int, tuple[torch.Tensor, Any]] = {}
        self._hook = _Hook(self)
        self._refresh()
        self._on_step = (
            optimizer.register_step_pre_hook(lambda *_: self._begin()),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        )
        self._scaling = optimizer.__dict__.get("_step_supports_amp_scaling")
        optimizer._step_supports_amp_scaling = _NoScaler()  # a GradScaler asks for its truth

    def __repr__(self) -> str:
        return f"StepInBackward({type(self.optimizer).__name__}, {len(self._handles)} parameters)"

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context leave their gradients in ``.grad``, as they do without this class.

        For all backward passes of a step but the last one, which updates with the sum; and for those of other losses
        that go through these parameters, after which ``zero_grad()`` drops the gradients. Where the last one is in it
        too, all is as in the ordinary loop, and ``optimizer.step()`` updates.

        Raises:
            OptimizerError: clipping is global, and a second pass would find the gradients summed already.
        """
        if self.clip == "global":
            raise OptimizerError(
                "gradients cannot be kept for a later backward pass where their global norm is taken in two passes",
                cure="remove() this, and accumulate and clip in the ordinary loop",
            )
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    def backward(self, loss: torch.Tensor) -> torch.Tensor | None:
        """The backward pass of a loss; with global clipping two of them, the first of which only measures.

        Args:
            loss: what is minimized.

        Returns:
            With global clipping the norm of all gradients before it, as ``clip_grad_norm_`` returns it; else None.

        Raises:
            OptimizerError: with global clipping, a parameter has a gradient already.
        """
        if self.clip != "global" or self.max_norm is None:
            return loss.backward()
        self._refresh()
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                self._refuse(parameter, "has a gradient before the first of two passes", "call zero_grad() first")
        norms = self._norms = {}
        try:
            loss.backward(retain_graph=True)
        finally:
            self._norms = None
        found = [norms[id(p)] for p in parameters_of(self.optimizer) if id(p) in norms]
        total = self._total = torch.nn.utils.get_total_norm(found)
        try:
            loss.backward()
        finally:
            self._total = None
        return total

    def remove(self) -> None:
        """Make the optimizer an ordinary one again, with the state that it has."""
        for _, handle in self._handles.values():
            handle.remove()
        for handle in self._on_step:
            handle.remove()
        self._handles.clear()
        self._stepped.clear()
        self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        if self._scaling is not None:
            self.optimizer._step_supports_amp_scaling = self._scaling

    def take(self, parameter: torch.Tensor) -> None:
        """Update a parameter whose gradient is there, and free the gradient; autograd calls it.

        Raises:
            OptimizerError: it was updated in this step already, or gradients are asked for that this cannot serve.
        """
        gradient, group = parameter.grad, None if self._waits else self._group_of(parameter)
        if gradient is None or group is None:
            return
        if torch.is_grad_enabled():
            cure = "torch.autograd.grad(..., create_graph=True) gives gradients to differentiate; or use accumulate()"
            self._refuse(parameter, "received a gradient of backward(create_graph=True)", cure)
        if self._norms is not None:
            self._norms[id(parameter)] = torch.nn.utils.get_total_norm([gradient])
        else:
            self._step(parameter, gradient, group)
        parameter.grad = None

    def was_updated(self, parameter: torch.Tensor) -> bool:
        """Whether it was updated in a backward pass since the last ``optimizer.step()``."""
        return id(parameter) in self._stepped

    def norm_of(self, parameter: torch.Tensor, kind: float) -> torch.Tensor:
        """The norm of the gradient that it was updated with, before it was clipped.

        Args:
            parameter: one that was updated since the last ``optimizer.step()``.
            kind: the order of the norm; it is measured from the next step on, and not a number until then.
        """
        found, self._norm = self._stepped.get(id(parameter)) if self._norm == kind else None, kind
        return parameter.new_tensor(math.nan) if found is None else found

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if id(parameter) in self._stepped:
            cure = (
                "call optimizer.step() after each backward pass; put all backward passes of a step but the last, and "
                "those of other losses that go through these parameters, into `with stepper.accumulate():`"
            )
            self._refuse(parameter, "received a second gradient before optimizer.step(), after the first updated", cure)
        norm = None if self._norm is None else torch.nn.utils.get_total_norm([gradient], self._norm)
        if self.clip == "global":
            if self._total is None:
                self._refuse(parameter, "cannot be clipped by the norm of all", "call stepper.backward(loss)")
            torch.nn.utils.clip_grads_with_norm_([parameter], float(self.max_norm or 0), self._total)
        elif self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], self.max_norm)
        self._stepped[id(parameter)] = norm
        self._update(view_of(self.optimizer, [{**group, "params": [parameter]}], self.optimizer.state))

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Its group; None where the optimizer does not have it any more."""
        if self.optimizer.param_groups is not self._known:  # load_state_dict makes new ones
            self._refresh()
        return self._groups.get(id(parameter))

    def _refresh(self) -> None:
        """Find the parameters that the optimizer has now; those that are new are updated in the next backward pass."""
        self._known = self.optimizer.param_groups
        self._groups = {id(p): group for group in self._known for p in group["params"]}
        for key in self._handles.keys() - self._groups.keys():
            self._handles.pop(key)[1].remove()
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad and id(parameter) not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._hook)
                self._handles[id(parameter)] = parameter, handle

    def _begin(self) -> None:
        """Before ``optimizer.step()`` updates what has a gradient left: what was accumulated, or is new."""
        self._check_left()
        if self.max_norm is not None and self.clip == "parameter":
            for parameter in parameters_of(self.optimizer):
                if parameter.grad is not None:
                    torch.nn.utils.clip_grad_norm_([parameter], self.max_norm)

    def _end(self) -> None:
        """After ``optimizer.step()``, which updated what had a gradient left."""
        self._check_left()
        self._stepped.clear()
        self._refresh()

    def _check_left(self) -> None:
        """Raise OptimizerError where something gave a gradient to a parameter after its update."""
        for key in self._stepped.keys() & self._handles.keys():
            parameter, _ = self._handles[key]
            if parameter.grad is not None:
                cure = (
                    "DistributedDataParallel averages gradients after this: use fully_shard, whose gradients come "
                    "averaged, or the ordinary loop; backward passes after the update of a step belong to the next one"
                )
                self._refuse(parameter, "has another gradient after its update in the backward pass", cure)

    def _refuse(self, parameter: torch.Tensor, what: str, cure: str) -> NoReturn:
        raise OptimizerError(f"{_name(self.optimizer, parameter)} {what}", cure=cure)


class _Hook:
    """What autograd calls with a parameter; it keeps neither the optimizer nor its parameters alive.

    Args:
        stepper: whom it tells.
    """

    def __init__(self, stepper: StepInBackward) -> None:
        self.stepper, self.said = weakref.ref(stepper), False

    def __call__(self, parameter: torch.Tensor) -> None:
        stepper = self.stepper()
        if stepper is not None:
            stepper.take(parameter)
        elif not self.said:
            self.said = True
            warnings.warn(
                "a parameter has a gradient, but the optimizer that was to update it in the backward pass is gone: "
                "keep it as long as it is to train, or call remove() of what step_in_backward() returns",
                stacklevel=2,
            )

    def __reduce__(self) -> Any:
        return _nothing, ()  # a parameter that is written to a file leaves it behind


class _NoScaler:
    """The truth that a GradScaler asks an optimizer for before its step."""

    def __bool__(self) -> bool:
        raise OptimizerError(
            "a GradScaler scales all gradients back after the backward pass, where parameters were updated in it: "
            "with gradients that were scaled",
            cure="train in bfloat16, which needs no GradScaler, or in the ordinary loop; begin again with the weights",
        )


def _nothing() -> Callable[[torch.Tensor], None]:
    return lambda _: None


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of all groups, in order."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _name(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> str:
    """A parameter for a message: its name where the optimizer knows it, else where it is, and its shape."""
    for number, group in enumerate(optimizer.param_groups):
        for index, other in enumerate(group["params"]):
            if other is parameter:
                names = group.get("param_names") or {}
                name = names[index] if index < len(names) else f"parameter {index} of group {number}"
                return f"{name}, {list(parameter.shape)},"
    return f"a parameter of {list(parameter.shape)}"


def stepper_of(parameter: Any) -> StepInBackward | None:
    """Who updates a parameter in the backward pass."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = [hook.stepper() for hook in hooks.values() if isinstance(hook, _Hook)]
    return next((stepper for stepper in found if stepper is not None), None)
