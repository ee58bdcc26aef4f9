"""The user's module as a function of flat tensors, which is what is traced; what its forward pass did is told."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.capture import autograd_functions, changed_parameters
from onnxtrain.capture.attribute_reads import Attribute, Reads
from onnxtrain.capture.autocast import Autocast
from onnxtrain.capture.autograd_functions import Functions
from onnxtrain.capture.carried import Carried, carried_by, carry, exchanged, numbers_carried, refuse_written, unchanged
from onnxtrain.capture.found_elsewhere import Borrowed, FoundElsewhere, largest_in_memory_of
from onnxtrain.capture.given import Change, Given
from onnxtrain.capture.hidden_changes import HiddenChanges, Versions, hidden
from onnxtrain.capture.host_random import HostGenerators, seeds_refused
from onnxtrain.capture.known_calls import Count
from onnxtrain.capture.left_behind import Changes, Watch, places_read
from onnxtrain.capture.left_outside import LeftOutsideError
from onnxtrain.capture.looks import Look
from onnxtrain.capture.named_values import NamedValues
from onnxtrain.capture.owned_tensors import names_of, owned_by, tensors_held
from onnxtrain.capture.places import Place
from onnxtrain.capture.reached_code import Named
from onnxtrain.capture.rehearsal import Answers
from onnxtrain.capture.replay import Path, Replay
from onnxtrain.capture.rewritten import Contents, Copied, Rewritten, is_trained_leaf, refuse_reshaped
from onnxtrain.capture.schema import Schema, flatten
from onnxtrain.capture.shared_memory import refuse_shared
from onnxtrain.capture.size_guards import Repeated
from onnxtrain.capture.source_lines import caught_among
from onnxtrain.capture.stand_ins import StandIns
from onnxtrain.capture.substitutes import Substitutes
from onnxtrain.capture.symbolic_sizes import Assumed, symbolic_sizes
from onnxtrain.errors import CaptureError, HostRandomError, noted

PREFIX = "module."  # what the wrapper below puts before the user's parameter names


class Result:
    """What a traced forward pass returned, and what was seen of it.

    Attributes:
        schema: the structure of the output.
        sources: for each tensor of the output, the position among the returned (distinct) tensors.
        assumed: what was taken to be so of sizes (``symbolic_sizes``).
        changed: the tensors of the input that the forward pass changed in place.
        rewritten: what they hold then, where the forward pass had copies of them.
        written: the names of parameters that it changed in place, with whether they are trained.
        calls: the calls of ``torch.autograd.Function`` that were recorded; operators of the program name them.
        recorded: how many calls of operators were recorded, and how many were known.
        left: where the call left something on the module.
        given: what it changed in the containers among its arguments.
        reformed: what is wrong, by name, with a buffer that it left in another form, if it reads what that was.
        path: what the call saw in tensors.
        settle: does to the module what the call did to it, but for tensors.
        outside: where it left a tensor outside of the module.
        borrowed: the tensors that it read and that are neither the module's nor given to it.
        read: the attributes that it read and that are collections, numbers or tensors.
        unread: those of users' classes that it did not read.
        names: what Python code has under names, as it was before the call.
        tracked: what the trace recorded of tensors that there still are, and the identities of its inputs.
    """

    def __init__(self) -> None:
        self.assumed = Assumed()
        self.changed: frozenset[int] = frozenset()
        self.rewritten: tuple[Rewritten, ...] = ()
        self.written: dict[str, bool] = {}
        self.calls: list[Any] = []
        self.recorded = Count()
        self.schema: Schema | None = None
        self.sources: tuple[int, ...] = ()
        self.left: tuple[Place, ...] = ()
        self.given: tuple[Change, ...] = ()
        self.reformed: Mapping[str, CaptureError] = {}
        self.path = Path()
        self.settle: Callable[[], None] = lambda: None
        self.outside: LeftOutsideError | None = None
        self.borrowed: tuple[Borrowed, ...] = ()
        self.read: set[Attribute] = set()
        self.unread: frozenset[Attribute] = frozenset()
        self.names = NamedValues(())
        self.tracked: tuple[Mapping[torch.Tensor, Any], frozenset[int]] = ({}, frozenset())

    def forget(self) -> list[weakref.ref[torch.Tensor]]:
        """Let go of what the trace recorded; the tensors that there still are, but for its inputs."""
        (tracked, inputs), self.tracked = self.tracked, ({}, frozenset())
        return [weakref.ref(t) for t in tracked if id(t) not in inputs]


class FlatModule(torch.nn.Module):
    """The user's module as a function of flat tensors that returns flat tensors.

    Args:
        module: the user's module.
        inputs: schema of the call.
        autocast: the state to run it in.
        functions: what becomes of classes of ``torch.autograd.Function``.
        ignored: names of attributes that do not concern the forward pass.
        answers: what looks at tensors saw in a rehearsal; None where checks are to be left out and other looks refused.
        repeated: the inputs that come again (``size_guards.repeated_among``).
        stand_ins: of its layers, while it is traced.
        named: the names that its code mentions.
        given: the looks at numbers that the call is given, and that may be others, by position.

    Attributes:
        result: filled by the forward pass.
        gradients: whether they are enabled while it is traced: a graph serves calls with and without them.
        copied: the inputs of which it is given copies, because it changes them in place.
        adopted: tensors of others that it changes in place, by the names of buffers that they are here.
        carried: tensors of state that it sets anew, by the names of buffers that they are here.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Schema,
        autocast: Autocast,
        functions: Functions | None = None,
        ignored: Collection[str] = (),
        answers: Answers | None = None,
        repeated: Repeated = (),
        stand_ins: StandIns | None = None,
        named: Sequence[Named] = (),
        given: Mapping[int, Look] | None = None,
    ) -> None:
        super().__init__()
        self._stand_ins = stand_ins or StandIns(())
        self.module, self._ignored, self._answers, self.repeated = module, ignored, answers, dict(repeated)
        self._inputs, self._autocast, self._functions = inputs, autocast, functions or Functions()
        self._names, self.gradients, self._owned = names_of(module), True, owned_by(module)
        self.copied: dict[int, Copied] = {}
        self.adopted: dict[str, torch.Tensor] = {}
        self.carried: dict[str, Carried] = {}
        self._named, self._given = named, given or {}
        self._carry()
        self.result = Result()
        self.train(module.training)

    def train(self, mode: bool = True) -> FlatModule:
        """Only this wrapper's own flag: the user's submodules keep the modes they have."""
        self.training = mode
        return self

    def adopt(self, tensor: torch.Tensor) -> None:
        """Have a tensor of others as a buffer: what the call writes to it is an output.

        Raises:
            CaptureError: a gradient is computed for it.
        """
        tensor = largest_in_memory_of(tensor, [*tensors_held(self.module), *self.result.names.tensors()])
        if tensor.requires_grad:
            raise hidden("the forward pass", "one that is trained and no parameter of the module,")
        name = f"_adopted_{len(self.adopted)}"
        self.adopted[name] = tensor
        self.register_buffer(name, tensor)

    def take_back(self) -> None:
        """Let what has a name outside of the module be what it was before the latest call: it is called again."""
        self.result.names.take_back()
        self.result.names = NamedValues(())

    def finds_state(self, program: torch.export.ExportedProgram) -> bool:
        """Whether a trace read tensors of an attribute and set others there, which are state: the next one has buffers.

        Args:
            program: what was traced.
        """
        read = [*filter(torch.is_tensor, program.constants.values()), *self.adopted.values()]
        found = carry(self.module, places_read(self.module, self.result.left, read, self.result.read))
        if found:
            self._carry()
        return found

    def _carry(self) -> None:
        for name in (*self.adopted, *self.carried):
            delattr(self, name)
        self.adopted = {}
        self.carried = {f"_carried_{i}": carried for i, carried in enumerate(carried_by(self.module))}
        self._state = {name: carried.of(self.module) for name, carried in self.carried.items()}
        self._counted = numbers_carried(self.module)
        for name, tensor in self._state.items():
            with torch.inference_mode(False):
                own = tensor.clone() if tensor.is_inference() else tensor
            self.register_buffer(name, own.detach().requires_grad_() if own.requires_grad else own)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The module's distinct output tensors, what it left on itself too, what its inputs became and what was looked
        at, then what it changes: its buffers, and parameters.
        """
        own = {name: self.get_buffer(name) for name in self.carried}
        state = {name: t.clone() if t.requires_grad else t for name, t in own.items()}  # no leaf, as it is none outside
        instead: dict[Carried, Any] = {self.carried[name]: tensor for name, tensor in state.items()}
        replay = Replay(self._answers or Answers(), tensors)
        instead |= {number: replay.counted(number.look(self.module), instead[number]) for number in self._counted}
        with exchanged(self.module, instead), changed_parameters.copies(self.module):
            return self.called(tensors, Versions(state), replay)

    def called(self, tensors: tuple[torch.Tensor, ...], state: Versions, replay: Replay) -> tuple[torch.Tensor, ...]:
        """What ``forward`` gives, with the buffers of state in their places."""
        mode: Any = get_proxy_mode()
        self.result.tracked = mode.tracer.tensor_tracker, frozenset(map(id, tensors))
        inputs = Contents([t.clone() if i in self.copied else t for i, t in enumerate(tensors)])
        args, kwargs = self._arguments(inputs, replay)
        given, buffers = Given(args, kwargs), dict(self.module.named_buffers())
        parameters = Versions(dict(self.module.named_parameters()))
        adopted = {name: self.get_buffer(name) for name in self.adopted}
        owners = {id(tensor): self.adopted[name] for name, tensor in adopted.items()}
        had, has = self._owned | self.adopted, owned_by(self.module) | adopted
        elsewhere, all_of_them = FoundElsewhere(had, has), Versions(has)
        watch = Watch(self.module, self._ignored, self._names, owners, {c.place for c in self._counted})
        named = self.result.names = NamedValues(self._named)
        reads, unseen = Reads(self.module), HiddenChanges()
        try:
            with noted() as errors, self._watched(tensors, elsewhere, unseen, replay, reads):
                result = self.module.forward(*args, **kwargs)  # the module's own hooks run at every call, outside
            if (caught := caught_among(errors)) is not None:  # eager PyTorch has none, and goes another way
                raise caught
            elsewhere.refuse_written()
            named.restore(owners)
            changes = watch.changes(reads)
            named.refuse_changed(self.module)
        except Exception:
            named.take_back()
            watch.refuse_parts()  # which may be why
            raise
        finally:
            self.result.settle = functools.partial(self._settle, watch.take_back())
        self.result.read, self.result.unread = reads.found, reads.unread()
        self.result.changed = inputs.changed()
        changed, written = parameters.written(), state.written()
        refuse_shared(had, has, all_of_them.written())
        refuse_reshaped(all_of_them.reshaped(), adopted, mode.tracer.graph)
        changed_parameters.note(self.module, [*unseen.parameters, *filter(is_trained_leaf, changed.values())])
        if written:
            others = [*tensors_held(self.module), *(b.tensor for b in elsewhere.borrowed.values())]
            refuse_written(self.module, {self.carried[name]: self._state[name] for name in written}, others)
        owned = buffers | changed | adopted | written
        self.result.written = {n: n in changed and t.requires_grad for n, t in owned.items() if n not in buffers}
        shown = self._shown(result, changes, given, inputs, replay, elsewhere)
        return (*shown, *(tensor.clone() for tensor in owned.values()))

    def _arguments(self, inputs: Contents, replay: Replay) -> Any:
        """What the module is called with: tensors, and numbers that may be others, which the call looks at first."""
        tensors = [inputs.tensors[self.repeated.get(i, i)] for i in range(len(inputs.tensors))]
        return self._inputs.restore(tensors, number=lambda index, tensor: replay.counted(self._given[index], tensor))

    def _settle(self, settle: Callable[[], None]) -> None:
        with unchanged(self.module):  # the graph has yet to read it
            settle()

    @contextlib.contextmanager
    def _watched(
        self,
        tensors: Sequence[torch.Tensor],
        elsewhere: FoundElsewhere,
        unseen: HiddenChanges,
        replay: Replay,
        reads: Reads,
    ) -> Iterator[None]:
        """What there is around the call while it is traced."""
        generators = HostGenerators(self.module, self._named)
        functions = autograd_functions.recording(
            self.module, self.result.calls, self._functions, lambda: self.result.assumed.ask_gradients()
        )
        sizes, whole, layers = symbolic_sizes(tensors), Substitutes(elsewhere, unseen), self._stand_ins.calls()
        looks = contextlib.nullcontext() if self._answers is None else replay.within()
        noted, seeds = reads.noted(), seeds_refused()
        try:
            with self._autocast.enter(), functions, sizes as self.result.assumed, whole, looks, layers, noted, seeds:
                yield
            if generator := generators.drawn:
                raise HostRandomError(generator)
        finally:
            generators.restore()

    def _shown(
        self, result: Any, changes: Changes, given: Given, inputs: Contents, replay: Replay, elsewhere: FoundElsewhere
    ) -> list[torch.Tensor]:
        """The distinct tensors of what is returned, of what is left, what inputs became, and what was looked at."""
        written = given.changes()
        self.result.left, self.result.given = tuple(changes.left), tuple(written)
        self.result.reformed = changes.reformed
        whole = result, tuple(changes.left.values()), tuple(written.values())
        found, self.result.schema = flatten(whole if any(whole[1:]) else result, "output", given=given.keys)
        changed_parameters.refuse_trained(self.module, changes.parameters, found)
        found = elsewhere.now(torch.clone, found)
        copied = sorted(self.result.changed & self.copied.keys())
        distinct = list({id(t): t for t in [*found, *(inputs.tensors[i] for i in copied)]}.values())
        place = {id(t): i for i, t in enumerate(distinct)}
        self.result.sources = tuple(place[id(t)] for t in found)
        outputs = [place[id(inputs.tensors[i])] for i in copied]
        self.result.rewritten = tuple(
            inputs.rewritten(i, o, self.copied[i]) for i, o in zip(copied, outputs, strict=True)
        )
        self.result.borrowed = tuple(elsewhere.borrowed.values())
        seen, self.result.path = replay.path(len(distinct))
        self._stand_ins.check_kept()
        return [*map(self._stand_ins.shown, distinct), *seen]
