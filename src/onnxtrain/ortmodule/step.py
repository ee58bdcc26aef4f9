"""One training step inside autograd: forward and backward of the whole module as one node."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.compiler import Compiled
from onnxtrain.errors import GradientError
from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir import shapes
from onnxtrain.ortmodule import randomness
from onnxtrain.ortmodule.deferred import DeferredTensor
from onnxtrain.ortmodule.paths import MissedError
from onnxtrain.ortmodule.rows import beside
from onnxtrain.ortmodule.session import Chosen, Session
from onnxtrain.ortmodule.sizes import size_of
from onnxtrain.ortmodule.sparsity import density_table, step_line
from onnxtrain.ortmodule.tensors import as_torch
from onnxtrain.ortmodule.verification import Verification

_LOG = logging.getLogger(__name__)


def run(session: Session, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a call of the module; the outputs carry gradients where any input or parameter requires one."""
    inputs = session.inputs(tensors)
    differentiable = session.differentiable(inputs)
    named = dict(zip(session.signature.inputs, inputs, strict=True))
    if not differentiable:
        chosen = session.choose(named, (), ())
        forward = chosen.compiled.executable.forward
        outputs = _on_its_path(session, chosen.compiled, inputs, lambda: forward([*inputs, *chosen.rows])[0])
        return _finish(session, chosen.compiled, outputs)
    starts_verification = session.options.verify and session.verification is None
    session.exact = starts_verification and session.is_random
    chosen = session.choose(named, differentiable, session.expected.names)
    state = _State(session, chosen, named, differentiable)
    made = _Step.apply(state, *(named[name] for name in differentiable))
    _report(session, chosen, named)
    found = dict(zip(state.compiled.plan.signature.outputs, made, strict=True))
    if not state.chosen.waiting:
        return list(found.values())
    sources = [named[name] for name in differentiable]
    return [found[n] if n in found else state.deferred(n, sources) for n in session.signature.outputs]


def _on_its_path(
    session: Session, compiled: Compiled, inputs: Sequence[torch.Tensor], compute: Callable[[], list[Any]]
) -> list[Any]:
    """What a forward pass computes, where it sees in tensors what the session's path says.

    Raises:
        MissedError: it does not, or stops where a number that was seen does not fit; random numbers are as before.
    """
    if not session.captured.path:
        return compute()
    shapes = [x.shape for x in inputs[: len(session.signature.user_inputs)]]
    before = randomness.state()
    try:
        session.path_check.before(inputs, shapes)
        outputs = compute()
        session.path_check.after(dict(zip(compiled.plan.signature.outputs, outputs, strict=False)), shapes)
    except MissedError:
        randomness.restore(before)
        raise
    except Exception as error:  # whatever a kernel raises for sizes that do not fit
        randomness.restore(before)
        raise MissedError() from error
    return outputs


def _report(session: Session, chosen: Chosen, inputs: dict[str, torch.Tensor]) -> None:
    """Say what the step skips, where that is asked for."""
    session.steps += 1
    talks = _LOG.isEnabledFor(logging.INFO)
    if talks or session.steps == 1:
        session.latest_work = session.work(chosen, inputs)
    if talks:
        _LOG.info("step %d: %s", session.steps, step_line(chosen, session.latest_work))
    if session.options.print_input_density and session.latest_choice is not None and chosen.batch.held:
        print(density_table(session.steps, session.latest_choice[1], chosen.batch, session.sizes.of(inputs)))


def _finish(session: Session, compiled: Compiled, outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Write buffers back; the user's outputs as torch tensors."""
    made = [as_torch(v) for v in outputs]
    count = len(compiled.plan.signature.outputs)
    session.write_buffers(made[count:])
    seen: set[int] = set()
    for index, tensor in enumerate(made[:count]):
        if id(tensor) in seen or tensor._is_view():  # a value, its detached self, and views: autograd knows them apart
            made[index] = tensor.detach()
        seen.add(id(tensor))
    return made[:count]


class _State:
    """What one step keeps between its forward and its backward."""

    def __init__(
        self, session: Session, chosen: Chosen, inputs: dict[str, torch.Tensor], differentiable: Sequence[str]
    ) -> None:
        self.session, self.chosen, self.differentiable = session, chosen, list(differentiable)
        users = session.signature.user_inputs
        self.inputs = inputs | {name: inputs[name].detach() for name in users}
        self.random = randomness.state() if session.is_random else None
        self.versions = [x._version for x in inputs.values()]
        # content of buffers that the forward pass will change, with which it may have to run again
        self.before = {name: inputs[name].clone() for name in session.signature.buffer_updates if name in inputs}
        self.saved: Any = None
        self.used = self.is_retained = False
        self.visible: list[tuple[str, torch.Tensor, int]] = []
        self.like: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.verification: Verification | None = None
        self.late: Late | None = None

    @property
    def compiled(self) -> Compiled:
        """The compiled graph."""
        return self.chosen.compiled

    def forward(self) -> list[torch.Tensor]:
        """Run the forward pass and note the versions of all tensors that the user could change before the backward."""
        session = self.session
        if session.options.verify and session.verification is None:
            tensors = [self.inputs[n] for n in session.signature.user_inputs]
            self.verification = Verification(session.module, session.captured, tensors)
        outputs = _on_its_path(session, self.compiled, list(self.inputs.values()), self.compute)
        if self.verification is not None:
            session.verification = self.verification.report
        made = _finish(session, self.compiled, outputs)
        names = self.compiled.plan.signature.outputs
        self.like = {n: (t.shape, t.dtype, t.device) for n, t in zip(names, made, strict=True)}
        watched = session.watched(self.compiled)
        named = list(self.inputs.items())
        named += zip(names, (t.detach() for t in made), strict=True)
        self.visible = [(n, t, t._version) for n, t in named if n in watched]
        if self.verification is not None:
            self.verification.check_forward(dict(zip(names, made, strict=True)), self._zeros())
        return made

    def compute(self) -> list[Any]:
        """Outputs and buffer updates; what the backward pass needs is kept."""
        outputs, self.saved = self._execute(self.inputs)
        return outputs

    def backward(self, dys: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the differentiable inputs, in order."""
        self._check()
        given = dict(zip(self.compiled.plan.signature.outputs, dys, strict=True))
        received = tuple(n for n, dy in given.items() if dy is not None)
        self._check_padding(given)
        self.session.learn_padding(self.inputs, given)
        self._choose(received)
        plan = self.compiled.plan
        received_dys = dict(given) if self.verification is not None else {}
        seeds = [self._seed(given[name], name) for name in plan.output_gradients]
        del dys, given
        made = self.compiled.executable.backward(self.saved, seeds)
        self.saved, self.visible = None, self.visible if self.is_retained else []
        gradients = {n: None if g is None else as_torch(g) for n, g in zip(plan.gradients, made, strict=True)}
        result = [gradients.get(name) for name in self.differentiable]
        if self.verification is not None:
            self.verification.check_backward(received_dys, dict(zip(self.differentiable, result, strict=True)))
            self.verification = None  # a retained graph may be walked again
        return result

    def _check_padding(self, dys: dict[str, torch.Tensor | None]) -> None:
        """A gradient for rows that were not computed would be lost.

        Raises:
            GradientError: there is one.
        """
        for name, rows in self._zeros().items():
            dy = dys.get(name)
            if dy is not None and beside(dy, rows).any():
                place = self.session.place_of(name)
                raise GradientError(
                    f"{place} received a gradient at padded positions, where it is zeros and not computed: earlier "
                    "steps did not read them",
                    cure="mask padding in what is computed of it, or keep it: Options(strict=True)",
                )

    def _seed(self, dy: torch.Tensor | None, name: str) -> torch.Tensor:
        """The gradient of an output as the graph wants it: zeros where there is none."""
        if dy is not None:
            return dy.contiguous()
        shape, dtype, device = self.like[name]
        return torch.zeros(shape, dtype=dtype, device=device)

    def _check(self) -> None:
        if self.used and not self.is_retained:
            raise GradientError(
                "backward ran a second time through the same forward pass, whose saved values are freed",
                cure="say so at the first one, loss.backward(retain_graph=True), or call the module again",
            )
        self.used, self.is_retained = True, torch._C._autograd._get_current_graph_task_keep_graph()
        for name, tensor, version in self.visible:
            if tensor._version != version:
                raise GradientError(
                    f"{name} was modified in place between the forward pass and the backward pass that needs it",
                    cure="run the backward pass first, or modify a copy",
                )

    def _choose(self, received: tuple[str, ...]) -> None:
        """Take the variant for the outputs that received a gradient; run forward again where its values are missing.

        They are after a backward pass, which frees them or writes over them, and where too few outputs were expected.
        """
        session, is_expected = self.session, {*received} <= self.chosen.asked
        session.expected.learn(received)
        if is_expected and self.saved is not None:
            return
        self._check_unchanged()
        if not is_expected:
            own = tuple(n for n in session.expected.names if n in self.like)  # others were read late, and go back alone
            self.chosen = session.choose(self.inputs | self.before, self.differentiable, own)
        with randomness.replayed(self.random or randomness.state()):
            _, self.saved = self._execute(self.inputs | self.before)

    def _execute(self, inputs: dict[str, torch.Tensor]) -> tuple[list[Any], Any]:
        cache, wanted = self.session.casts, self.compiled.plan.signature.casts
        casts = cache.casts(wanted, inputs) if cache is not None and wanted else []
        return self.compiled.executable.forward([*inputs.values(), *self.chosen.rows, *casts])

    def _zeros(self) -> dict[str, torch.Tensor]:
        """For each output that is zeros beside some rows, which rows."""
        held = self.chosen.batch.held
        return {name: held[rows] for name, rows in self.chosen.zeros.items()}

    def deferred(self, name: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """An output that is computed when it is read, and whose gradient goes to these tensors of the user's."""
        session = self.session
        value = next(v for v in session.captured.graph.model.graph.outputs if v.name == name)
        sizes = session.sizes.of(self.inputs)
        shape = [size_of(d, sizes) for d in shapes.known_dims(value)]
        dtype, device = torch_dtype(int(shapes.dtype_of(value))), next(iter(self.inputs.values())).device
        if self.late is None:
            self.late = Late(session, self.inputs | self.before, self.differentiable, self.random, sources)
        tracked = session.is_tracked(name, self.differentiable)
        return DeferredTensor(shape, dtype, device, tracked, functools.partial(self.late.value, name))

    def _check_unchanged(self) -> None:
        """Running forward again needs the inputs it had.

        Raises:
            GradientError: a parameter or input was modified since.
        """
        pairs = zip(self.inputs.items(), self.versions, strict=True)
        changed = [n for (n, x), version in pairs if x._version != version and n not in self.before]
        if changed:
            raise GradientError(
                "this backward pass needs the forward pass once more, for an output that received its first gradient "
                f"or for a retained graph, and {changed[0]} changed since",
                cure="run all backward passes of a call before parameters and inputs change, or call the module again",
            )


class Late:
    """Outputs of a step that are computed after it, when they are read.

    Args:
        session: the graph.
        inputs: the step's inputs, buffers with their content before it.
        differentiable: names of the inputs that require a gradient.
        random: the generators' state before the step; None where nothing is random.
        sources: the tensors that require a gradient, as the user has them.
    """

    def __init__(
        self,
        session: Session,
        inputs: dict[str, torch.Tensor],
        differentiable: Sequence[str],
        random: randomness.State | None,
        sources: Sequence[torch.Tensor],
    ) -> None:
        self.session, self.inputs, self.differentiable, self.random = session, inputs, differentiable, random
        self._sources = sources
        self.versions = [x._version for x in inputs.values()]
        self._outputs: dict[str, torch.Tensor] = {}

    def value(self, name: str) -> torch.Tensor:
        """One output, as eager computes it in all its rows; a gradient flows where gradients are enabled."""
        session = self.session
        if name not in session.read:
            session.read.add(name)
            place = session.place_of(name)
            _LOG.info("%s was read: from the next step on it is computed with the loss", place)
            if any(x._version != version for x, version in zip(self.inputs.values(), self.versions, strict=True)):
                warnings.warn(
                    f"{place} was read after parameters or inputs changed, and is computed with what they are now. "
                    "From the next step on it is computed with the loss; Options(lazy_outputs=False) does so always",
                    stacklevel=2,
                )
        if not torch.is_grad_enabled() or not session.is_tracked(name, self.differentiable):
            return self.outputs()[name]
        return _LateStep.apply(self, name, *self._sources)

    def outputs(self) -> dict[str, torch.Tensor]:
        """All outputs; buffers are not written a second time."""
        if not self._outputs:
            compiled = self.session.variant((), ())
            with randomness.replayed(self.random or randomness.state()):
                made, _ = compiled.executable.forward(list(self.inputs.values()))
            names = compiled.plan.signature.outputs
            self._outputs = {n: as_torch(v) for n, v in zip(names, made, strict=False)}
        return self._outputs

    def gradients(self, name: str, dy: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of the differentiable inputs for the gradient of one output; the next step expects it."""
        self.session.expected.add(name)
        chosen = self.session.choose(self.inputs, self.differentiable, (name,))
        state = _State(self.session, chosen, self.inputs, self.differentiable)
        with randomness.replayed(self.random or randomness.state()):
            state.compute()
        return state.backward([dy if n == name else None for n in chosen.compiled.plan.signature.outputs])


class _LateStep(torch.autograd.Function):
    """One output after the step; forward and backward run again where it receives a gradient."""

    @staticmethod
    def forward(ctx: Any, late: Late, name: str, *differentiable: torch.Tensor) -> torch.Tensor:
        ctx.late, ctx.name = late, name
        return late.outputs()[name].clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.late.gradients(ctx.name, dy.detach()))


class _Step(torch.autograd.Function):
    """The module's forward and backward as one autograd node."""

    @staticmethod
    def forward(ctx: Any, state: _State, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = state.forward()
        ctx.state = state
        ctx.set_materialize_grads(False)
        named = zip(state.compiled.plan.signature.outputs, outputs, strict=True)
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
