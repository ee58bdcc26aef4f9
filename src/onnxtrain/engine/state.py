"""What one step keeps between its forward pass and its backward pass, and both of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.compiler import Compiled
from onnxtrain.engine import randomness
from onnxtrain.engine.bound import BoundGraph, Chosen
from onnxtrain.engine.comparison import Reference
from onnxtrain.engine.memory_stats import StepMemory
from onnxtrain.engine.path_check import MissedError
from onnxtrain.engine.rows import beside
from onnxtrain.engine.tensors import accumulated, as_torch, memories
from onnxtrain.errors import GradientError


def on_its_path(
    bound: BoundGraph, compiled: Compiled, inputs: Sequence[torch.Tensor], compute: Callable[[], list[Any]]
) -> list[Any]:
    """What a forward pass computes, where it sees in tensors what the graph's path says.

    Raises:
        MissedError: it does not, or stops where a number that was seen does not fit; random numbers are as before.
    """
    if not bound.path:
        return compute()
    shapes = [x.shape for x in inputs[: len(bound.signature.user_inputs)]]
    before = randomness.state()
    try:
        bound.path_check.before(inputs, shapes)
        outputs = compute()
        bound.path_check.after(dict(zip(compiled.plan.signature.outputs, outputs, strict=False)), shapes)
    except MissedError:
        randomness.restore(before)
        raise
    except Exception as error:  # whatever a kernel raises for sizes that do not fit
        randomness.restore(before)
        raise MissedError() from error
    return outputs


def before_update(bound: BoundGraph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the buffers that a forward pass changes, by name: what it reads of them stays what it was.

    Args:
        bound: the graph.
        inputs: all its inputs by name.
    """
    return {name: inputs[name].clone() for name in bound.signature.buffer_updates if name in inputs}


def finish(
    bound: BoundGraph, compiled: Compiled, outputs: Sequence[Any], apart: Iterable[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Write buffers back; the user's outputs as torch tensors, each one of its own, and apart from some others."""
    made = [as_torch(v) for v in outputs]
    count = len(compiled.plan.signature.outputs)
    bound.owned.update(made[count:])
    seen = {id(tensor) for tensor in apart}
    for index, name in enumerate(compiled.plan.signature.outputs):
        tensor, is_detached = made[index], not bound.origins.get(name)
        # a value, its detached self, and views: autograd knows them apart
        if id(tensor) in seen or tensor._is_view() or (is_detached and tensor.requires_grad):
            made[index] = tensor.detach()
        seen.add(id(tensor))
    return made[:count]


class State:
    """What one step keeps between its forward and its backward.

    Args:
        bound: the graph.
        chosen: which of its variants.
        inputs: all its inputs by name.
        sources: those that require a gradient, as the user has them.
    """

    def __init__(
        self, bound: BoundGraph, chosen: Chosen, inputs: dict[str, torch.Tensor], sources: dict[str, torch.Tensor]
    ) -> None:
        self.bound, self.chosen, self.sources, self.differentiable = bound, chosen, sources, list(sources)
        self.parts, self._parted = bound.parts(chosen, inputs), chosen.compiled
        self.outputs = chosen.compiled.plan.signature.outputs  # that were given; the backward pass may choose anew
        users = bound.signature.user_inputs
        self.inputs = inputs | {name: inputs[name].detach() for name in users}
        self.random = randomness.state() if bound.is_random else None
        self.versions = [x._version for x in inputs.values()]
        self.before = before_update(bound, inputs)
        self.read = self.inputs | self.before  # what the forward pass is given
        self.saved: Any = None
        self.used = self.is_retained = False
        self.visible: list[tuple[str, torch.Tensor, int]] = []
        self.like: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.verification: Reference | None = None
        self.memory: StepMemory | None = None  # where its memory is printed
        self._walk: Iterator[None] | None = None  # the backward pass, while it runs
        self._results: list[Any] = []  # what it made, in the order of the plan's gradients
        self._memories: frozenset[int] = frozenset()  # of what the user gives the backward pass to read
        self._reached: frozenset[str] = frozenset()  # the inputs that eager would give a gradient
        self._made: dict[str, torch.Tensor | None] = {}  # gradients that were not taken yet

    @property
    def compiled(self) -> Compiled:
        """The compiled graph."""
        return self.chosen.compiled

    def sources_of(self, index: int) -> list[torch.Tensor]:
        """The differentiable inputs of a part, as the user has them."""
        return [self.sources[name] for name in self.parts[index].names]

    def forward(self) -> list[torch.Tensor]:
        """Run the forward pass and note the versions of all tensors that the user could change before the backward."""
        bound = self.bound
        if bound.compare is not None and bound.is_unverified:
            self.verification = bound.compare([self.inputs[n] for n in bound.signature.user_inputs])
        outputs = on_its_path(bound, self.compiled, list(self.read.values()), self.compute)
        if self.verification is not None:
            bound.verification = self.verification.report
        made = finish(bound, self.compiled, outputs, apart=self.sources.values())
        names = self.outputs
        self.like = {n: (t.shape, t.dtype, t.device) for n, t in zip(names, made, strict=True)}
        watched = bound.watched(self.compiled)
        named = list(self.read.items())
        named += zip(names, (t.detach() for t in made), strict=True)
        self.visible = [(n, t, t._version) for n, t in named if n in watched]
        if self.verification is not None:
            self.verification.check_forward(dict(zip(names, made, strict=True)), self._zeros())
        return made

    def compute(self) -> list[Any]:
        """Outputs and buffer updates; what the backward pass needs is kept."""
        outputs, self.saved = self._execute()
        return outputs

    def begin_backward(self, dys: Sequence[torch.Tensor | None]) -> None:
        """Begin the backward pass for gradients of the outputs; ``take`` runs it part by part."""
        self._check()
        if self.memory is not None:
            self.memory.before_backward()
        given = dict(zip(self.outputs, dys, strict=True))
        received = tuple(n for n, dy in given.items() if dy is not None)
        self._check_padding(given)
        self.bound.learn_padding(self.inputs, given)
        self._choose(received)
        self._reached = self.bound.reached(received)
        is_partial = any(given[name] is None for name in self.compiled.plan.output_gradients)
        kept = dict(given) if is_partial or self.verification is not None else {}
        if self.compiled.executable.added:
            users = (self.read[name] for name in self.bound.signature.user_inputs)
            self._memories = memories([*users, *(dy for dy in dys if dy is not None)])
        del dys
        self._begin_walk(given)
        if is_partial:
            self._made = self.rest()
            if not all(bool(x.isfinite().all()) for x in self._made.values() if x is not None):
                self._choose(received, exactly=True)
                self._begin_walk(dict(kept))
                self._made = self.rest()
        if self.verification is not None:
            self._made = self.rest()
            self.verification.check_backward(kept, self._made)
            self.verification = None  # a retained graph may be walked again
        elif self.compiled is not self._parted:
            self._made = self.rest()  # its segments are others than those of the nodes of autograd

    def _begin_walk(self, given: dict[str, torch.Tensor | None]) -> None:
        """Begin the backward pass for these gradients of the outputs, which are not kept here.

        One that did not arrive is zeros, which is as good as none unless they meet an infinite derivative.
        """
        plan = self.compiled.plan
        seeds = [self._seed(given[name], name) for name in plan.output_gradients]
        given.clear()
        self._results = [None] * len(plan.gradients)
        self._walk, self.saved = self.compiled.executable.walk(self.saved, seeds, self._results), None

    def give(self, gradients: dict[str, torch.Tensor | None]) -> None:
        """Have these gradients of all differentiable inputs, in order, taken part by part."""
        self._made = gradients

    def take(self, index: int) -> list[torch.Tensor | None]:
        """The gradients of a part, in the order of its names; the backward pass runs as far as they need.

        Raises:
            GradientError: a tensor that the backward pass still reads has changed since the part before.
        """
        part = self.parts[index]
        if self._walk is None:
            return [self._made.pop(name, None) for name in part.names]
        if index:
            self._check_visible({n for earlier in self.parts[:index] for n in earlier.names})
        is_last = index + 1 == len(self.parts)
        self._accumulate(part.names)
        for _ in self._walk if is_last else itertools.islice(self._walk, part.segments):
            pass
        made = [self._result(*at) for at in zip(part.names, part.places, strict=True)]
        if is_last:
            self._end()
        return made

    def _accumulate(self, names: Collection[str]) -> None:
        """Give the backward pass the gradients that it may add those of these inputs to, before it makes them."""
        for name, place in self.compiled.executable.added.items():
            if name in names and self._results[place] is None:  # else it is there already, before its part
                self._results[place] = accumulated(self.sources[name], self._memories)

    def rest(self) -> dict[str, torch.Tensor | None]:
        """The gradients of all differentiable inputs, in order: the backward pass runs to its end."""
        if self._walk is None:
            made, self._made = self._made, {}
            return made
        for _ in self._walk:
            pass
        places = {name: place for place, name in enumerate(self.compiled.plan.gradients)}
        made = {name: self._result(name, places.get(name)) for name in self.differentiable}
        self._end()
        return made

    def _result(self, name: str, place: int | None) -> torch.Tensor | None:
        """A gradient that the backward pass made; it is not kept, so that who takes it may have its memory.

        As in eager PyTorch there is none of what the outputs that received a gradient do not depend on, though the
        graph may have computed zeros, and zeros of what they depend on in a way that the graph left out. autograd calls
        hooks all the same, which eager does not: they get zeros, of which a hook can make something. What was added to
        the gradient of a parameter as the pass went on is not given once more.
        """
        source = self.sources[name]
        if name not in self._reached:
            return torch.zeros_like(source) if source._backward_hooks else None
        if place is None:
            return torch.zeros_like(source)
        gradient, self._results[place] = self._results[place], None
        is_added = source.is_leaf and gradient is source.grad
        return None if gradient is None or is_added else as_torch(gradient)

    def _end(self) -> None:
        self._walk, self._results, self.visible = None, [], self.visible if self.is_retained else []
        if self.memory is not None:
            self.memory.after_backward()

    def received(self, dys: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The gradients of outputs that arrived, by name, where the forward pass is to be run once more for them.

        Raises:
            GradientError: a tensor that this needs has changed, or a gradient is for rows that were not computed.
        """
        self._check()
        self._check_unchanged()
        given = dict(zip(self.outputs, dys, strict=True))
        self._check_padding(given)
        return {name: dy for name, dy in given.items() if dy is not None}

    def _check_padding(self, dys: dict[str, torch.Tensor | None]) -> None:
        """A gradient for rows that were not computed would be lost.

        Raises:
            GradientError: there is one.
        """
        for name, rows in self._zeros().items():
            dy = dys.get(name)
            if dy is not None and beside(dy, rows).any():
                place = self.bound.place_of(name)
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
        self._check_visible()

    def _check_visible(self, but: Collection[str] = ()) -> None:
        for name, tensor, version in self.visible:
            if tensor._version != version and name not in but:
                raise GradientError(
                    f"{name} was modified in place between the forward pass and the backward pass that needs it",
                    cure="run the backward pass first, or modify a copy",
                )

    def _choose(self, received: tuple[str, ...], exactly: bool = False) -> None:
        """Take the variant for the outputs that received a gradient; run forward again where its values are missing.

        They are after a backward pass, which frees them or writes over them, and where too few outputs were expected.

        Args:
            received: their names.
            exactly: whether it has to be for these alone; otherwise it may be for more of them.
        """
        bound, is_expected = self.bound, {*received} <= self.chosen.asked and not exactly
        if not exactly:
            bound.expected.learn(received)
        if is_expected and self.saved is not None:
            return
        self._check_unchanged()
        if not is_expected:
            wanted = received if exactly else bound.expected.names
            own = tuple(n for n in wanted if n in self.like)  # others were read late, and go back alone
            self.chosen = bound.choose(self.read, self.differentiable, own)
        with randomness.replayed(self.random or randomness.state()):
            _, self.saved = self._execute()

    def _execute(self) -> tuple[list[Any], Any]:
        cache, wanted = self.bound.casts, self.compiled.plan.signature.casts
        casts = cache.casts(wanted, self.read) if cache is not None and wanted else []
        return self.compiled.executable.forward([*self.read.values(), *self.chosen.rows, *casts])

    def _zeros(self) -> dict[str, torch.Tensor]:
        """For each output that is zeros beside some rows, which rows."""
        held = self.chosen.batch.held
        return {name: held[rows] for name, rows in self.chosen.zeros.items()}

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
