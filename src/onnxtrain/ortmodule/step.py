"""One training step inside autograd: forward and backward of the whole module as one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.compiler import Compiled
from onnxtrain.errors import GradientError
from onnxtrain.ortmodule import randomness
from onnxtrain.ortmodule.session import Session, as_torch
from onnxtrain.ortmodule.verification import Verification


def run(session: Session, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a call of the module; the outputs carry gradients where any input or parameter requires one."""
    inputs = session.inputs(tensors)
    differentiable = session.differentiable(inputs)
    if not differentiable:
        compiled = session.variant((), ())
        outputs, _ = compiled.executable.forward(inputs)
        return _finish(session, outputs)
    compiled = session.variant(differentiable, session.predicted_outputs())
    named = dict(zip(session.signature.inputs, inputs, strict=True))
    state = _State(session, compiled, named, differentiable)
    return list(_Step.apply(state, *(named[name] for name in differentiable)))


def _finish(session: Session, outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Write buffers back; the user's outputs as torch tensors."""
    made = [as_torch(v) for v in outputs]
    count = len(session.signature.outputs)
    session.write_buffers(made[count:])
    seen: set[int] = set()
    for index, tensor in enumerate(made[:count]):
        if id(tensor) in seen:  # a value and its detached self: autograd tells them apart by object
            made[index] = tensor.detach()
        seen.add(id(tensor))
    return made[:count]


class _State:
    """What one step keeps between its forward and its backward."""

    def __init__(
        self, session: Session, compiled: Compiled, inputs: dict[str, torch.Tensor], differentiable: Sequence[str]
    ) -> None:
        self.session, self.compiled, self.differentiable = session, compiled, list(differentiable)
        users = session.signature.user_inputs
        self.inputs = inputs | {name: inputs[name].detach() for name in users}
        self.random = randomness.state() if session.is_random else None
        self.versions = [x._version for x in inputs.values()]
        self.before: dict[str, torch.Tensor] = {}  # content of buffers that the forward pass will change
        if not session.confirmed:
            self.before = {name: inputs[name].clone() for name in session.signature.buffer_updates if name in inputs}
        self.saved: Any = None
        self.used = False
        self.visible: list[tuple[str, torch.Tensor, int]] = []
        self.like: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.verification: Verification | None = None

    def forward(self) -> list[torch.Tensor]:
        """Run the forward pass and note the versions of all tensors that the user could change before the backward."""
        session = self.session
        if session.options.verify and session.verification is None:
            self.verification = Verification(
                session.module, session.captured, [self.inputs[n] for n in session.signature.user_inputs]
            )
            session.verification = self.verification.report
        outputs, self.saved = self._execute(self.inputs)
        made = _finish(session, outputs)
        self.like = {n: (t.shape, t.dtype, t.device) for n, t in zip(session.signature.outputs, made, strict=True)}
        watched = session.watched(self.compiled)
        named = list(self.inputs.items())
        named += zip(session.signature.outputs, (t.detach() for t in made), strict=True)
        self.visible = [(n, t, t._version) for n, t in named if n in watched]
        if self.verification is not None:
            self.verification.check_forward(made)
        return made

    def backward(self, dys: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the differentiable inputs, in order."""
        self._check()
        received = tuple(n for n, dy in zip(self.session.signature.outputs, dys, strict=True) if dy is not None)
        self._choose(received)
        plan = self.compiled.plan
        given = dict(zip(self.session.signature.outputs, dys, strict=True))
        received_dys = dys if self.verification is not None else ()
        seeds = [self._seed(given[name], name) for name in plan.output_gradients]
        del dys, given
        made = self.compiled.executable.backward(self.saved, seeds)
        self.saved, self.visible = None, []
        gradients = {n: None if g is None else as_torch(g) for n, g in zip(plan.gradients, made, strict=True)}
        result = [gradients.get(name) for name in self.differentiable]
        if self.verification is not None:
            self.verification.check_backward(received_dys, dict(zip(self.differentiable, result, strict=True)))
        return result

    def _seed(self, dy: torch.Tensor | None, name: str) -> torch.Tensor:
        """The gradient of an output as the graph wants it: zeros where there is none."""
        if dy is not None:
            return dy.contiguous()
        shape, dtype, device = self.like[name]
        return torch.zeros(shape, dtype=dtype, device=device)

    def _check(self) -> None:
        if self.used:
            raise GradientError(
                "backward ran a second time through the same forward pass, whose saved values are freed",
                cure="call the module again before the second backward; retain_graph is not supported",
            )
        self.used = True
        for name, tensor, version in self.visible:
            if tensor._version != version:
                raise GradientError(
                    f"{name} was modified in place between the forward pass and the backward pass that needs it",
                    cure="run the backward pass first, or modify a copy",
                )

    def _choose(self, received: tuple[str, ...]) -> None:
        """Take the variant for the outputs that received a gradient; where too few were expected, run forward again."""
        session = self.session
        expected = set(self.compiled.plan.output_gradients)
        session.confirmed, first = True, not session.confirmed
        if set(received) == expected:
            return
        session.expected = received
        if set(received) <= expected:
            return
        self._check_unchanged(first)
        self.compiled = session.variant(self.differentiable, received)
        with randomness.replayed(self.random or randomness.state()):
            _, self.saved = self._execute(self.inputs | self.before)

    def _execute(self, inputs: dict[str, torch.Tensor]) -> tuple[list[Any], Any]:
        cache, wanted = self.session.casts, self.compiled.plan.signature.casts
        casts = cache.casts(wanted, inputs) if cache is not None and wanted else []
        return self.compiled.executable.forward([*inputs.values(), *casts])

    def _check_unchanged(self, first: bool) -> None:
        """Running forward again needs the inputs it had.

        Raises:
            GradientError: a parameter or input was modified since, or a buffer, whose content was not kept.
        """
        updates = self.session.signature.buffer_updates
        changed = [
            name
            for (name, x), version in zip(self.inputs.items(), self.versions, strict=True)
            if x._version != version and name not in updates
        ]
        if not first:
            changed += [name for name in updates if name in self.inputs]
        if changed:
            raise GradientError(
                f"an output received a gradient for the first time, and {changed[0]} changed since the forward pass",
                cure="call the module again: from now on its graph expects this gradient",
            )


class _Step(torch.autograd.Function):
    """The module's forward and backward as one autograd node."""

    @staticmethod
    def forward(ctx: Any, state: _State, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = state.forward()
        ctx.state = state
        ctx.set_materialize_grads(False)
        named = zip(state.session.signature.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(t for name, t in named if name not in state.compiled.tracked))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = ctx.state.backward([None if dy is None else dy.detach() for dy in dys])
        if torch.is_grad_enabled():  # create_graph=True: say so where the second backward arrives
            anchor = torch.empty(0, requires_grad=True)
            gradients = [None if g is None else _Once.apply(anchor, g) for g in gradients]
        return (None, *gradients)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        raise GradientError(
            "double backward: the gradient that ORTModule computed was differentiated again",
            cure="run the module whose gradient is differentiated (a gradient penalty) in eager PyTorch: model.module",
        )
