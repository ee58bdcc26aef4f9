"""All graphs of one module: the one that serves a call, or a new one, and why there had to be a new one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from onnxtrain.capture import ARGUMENT, Answers, Key, Kind, Path, count, line_that_draws, names_read, rehearse
from onnxtrain.engine import randomness
from onnxtrain.engine.path_check import MissedError
from onnxtrain.errors import (
    CaptureError,
    ContentError,
    HostRandomError,
    NumberError,
    OnnxTrainError,
    SetUpError,
    as_raised_by,
)
from onnxtrain.garbage import uncollected
from onnxtrain.options import Options
from onnxtrain.ortmodule.checks import check_devices, check_hooks, check_sharding
from onnxtrain.ortmodule.contents import Contents, collections_read, settled, settles
from onnxtrain.ortmodule.guards import Call, Inspector
from onnxtrain.ortmodule.left_unread import LeftUnread
from onnxtrain.ortmodule.paths import can_follow, difference, integers, too_many, varying
from onnxtrain.ortmodule.reasons import always_another, differences
from onnxtrain.ortmodule.session import Entry, Session
from onnxtrain.ortmodule.shards import discovery, in_eager, unless_in_shards, whole
from onnxtrain.ortmodule.varying_numbers import VaryingNumbers

_LOG = logging.getLogger(__name__)
_MANY = 8  # graphs of one module, or paths of one call, after which something is said


class Sessions:
    """The graphs of a module, found by what a call looks like.

    Args:
        module: the user's module.
        options: backend and checks.

    Attributes:
        entries: all graphs, in the order of their capture.
        calls: how many calls there were.
        eager: how many of them ran in eager PyTorch, because they saw something in a tensor that no graph stands on, or
            draw random numbers that no graph does.
        unsettled: how many ran there because what decides on a graph was another at each of the latest calls.
        initializing: how many ran there because the module was not set up yet: parameters were not there, say.
        without_graph: the calls that draw such numbers, with what was said of it.
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self.module, self.options = module, options
        self.entries: list[Entry] = []
        self.calls = self.eager = self.initializing = self.unsettled = 0
        self._is_lazy = True
        self.without_graph: dict[Call, HostRandomError] = {}
        self._in_vain = 0  # calls since the last one that was on a known path
        self._looks = self._told = False
        self._free: frozenset[Key] = frozenset()
        self._constant: frozenset[Key] = frozenset()
        self._set: set[str] = set()  # global names that calls set
        self._made: set[str] = set()  # what calls in eager PyTorch have set up
        self._latest: Entry | None = None
        self._unsettled: tuple[Call, Contents] | None = None
        self._by_call: dict[Call, list[Entry]] = {}
        self._numbers = VaryingNumbers(module)
        self._left_unread = LeftUnread(module)

    @functools.cached_property
    def inspector(self) -> Inspector:
        """What tells a call from others; made when the module has its parameters."""
        return Inspector(self.module, self.options.ignored_attributes)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session | None, Any]:
        """The graph that serves a call, captured where there is none, None where eager PyTorch does; what is returned.

        Raises:
            UnsupportedDataError: an input has a type that a graph cannot take.
            DeviceError: there is more than one device.
            ModuleError: a submodule has a hook that would be lost, or a parameter is not whole.
            CaptureError: the module cannot be captured; names the source line.
        """
        self.calls += 1
        if self._waits_for_parameters():
            self.initializing += 1
            return None, in_eager(self.module, args, kwargs)
        call = self.inspector.call(args, kwargs, self._numbers.arguments)
        is_without = bool(self.without_graph) and call in self.without_graph
        served = None if is_without else self._served(call, args, kwargs)
        if served is None and not is_without and self._is_unsettled(call):
            self.unsettled += 1
            return None, in_eager(self.module, args, kwargs)
        if served is None and not is_without and not self._is_full(call):
            try:
                served = self._new(call, args, kwargs)
            except SetUpError as error:
                return None, self._set_up(error, args, kwargs)
        if served is not None:
            self._in_vain = 0
            return served
        self.eager += 1
        self._in_vain += 1
        return None, in_eager(self.module, args, kwargs)

    def session_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Session | None, Sequence[torch.Tensor]]:
        """The graph that would serve a call, captured where there is none, None where eager PyTorch would; its inputs.

        Raises:
            CaptureError: the module cannot be captured; names the source line.
        """
        if self._waits_for_parameters():
            return None, ()
        call = self.inspector.call(args, kwargs, self._numbers.arguments)
        fitting = self._fitting(call)
        if fitting:
            return fitting[0].session, call.tensors
        self._check(call)
        entry = self._capture(call, args, self.inspector.ordered(kwargs))
        return None if entry is None else entry.session, call.tensors

    def _set_up(self, error: SetUpError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call in eager PyTorch returns, which sets the module up: makes layers, or parameters.

        Raises:
            SetUpError: one did so before.
        """
        if not self._made.isdisjoint(error.labels):
            raise error
        self._made |= {*error.labels}
        self.initializing += 1
        _LOG.info("a call in eager PyTorch sets the module up: %s", ", ".join(error.labels))
        result = in_eager(self.module, args, kwargs)
        del self.inspector  # it knows the module's parts
        for entry in self.entries:
            self.inspector.leaves(entry.session.captured)
        return result

    def _waits_for_parameters(self) -> bool:
        """Whether a call of eager PyTorch is to make the parameters of lazy modules."""
        owned = itertools.chain(self.module.parameters(), self.module.buffers()) if self._is_lazy else ()
        self._is_lazy = any(map(is_lazy, owned))
        return self._is_lazy

    def _check(self, call: Call) -> None:
        with whole(self.module):
            check_sharding(self.module)
            check_hooks(self.module, self.options.hooks)
            check_devices(self.module, call.tensors)

    def _served(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, Any] | None:
        """What a call returns on one of the paths that there are; None where it is on another one."""
        if self._in_vain >= _MANY and self.calls % _MANY and self._is_full(call):
            return None  # calls were on no known path for long: few are tried, which costs a forward pass each
        waiting = self._fitting(call)
        while waiting:
            try:
                return self._run(waiting[0], call, args, kwargs)
            except MissedError as missed:
                waiting = [e for e in waiting[1:] if can_follow(missed.found, e.path.looks)]
        return None

    def _run(self, entry: Entry, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, Any]:
        result = entry.session.run(call.tensors, args, kwargs)
        self._latest = entry
        entry.served += 1
        return entry.session, result

    def _fitting(self, call: Call) -> list[Entry]:
        """The graphs that may serve a call, the one that served the latest call first."""
        latest = self._latest
        if latest is not None and latest.call == call and latest.fits(call.tensors):
            if not latest.path:
                return [latest]
        else:
            latest = None
        others = [e for e in self._by_call.get(call, ()) if e is not latest and e.fits(call.tensors)]
        return others if latest is None else [latest, *others]

    def _paths(self, call: Call) -> list[Path]:
        return [e.path for e in self._by_call.get(call, ()) if e.path]

    def _is_full(self, call: Call) -> bool:
        """Whether there are so many paths of a call that no further one is captured; says so once."""
        paths = self._paths(call)
        if len(paths) < _MANY:
            return False
        if not self._told:
            self._told = True
            _LOG.warning("%s", too_many(type(self.module).__name__, paths))
        return True

    def _is_unsettled(self, call: Call) -> bool:
        """Whether graphs are in vain: many stand on other states of the module, and each call has another one.

        Such a state gets a graph once two calls in a row have it.
        """
        others = [e for e in self.entries if e.call.is_but_for_state(call)]
        stale = [e for e in others if e.call.state == call.state and not e.contents.are_the_same()]
        states = {e.call.state for e in others} | {c.state for c in self.without_graph if c.is_but_for_state(call)}
        if len(states - {call.state}) + len(stale) < _MANY:
            return False
        before, latest = self._unsettled, self.entries[-1]
        self._unsettled = call, latest.contents.now()
        if before is not None and before[0] == call and before[1].are_the_same():
            return False
        if not self.unsettled:
            reasons = differences(latest.call, latest.contents, call, self.inspector)
            _LOG.warning("%s", always_another(type(self.module).__name__, len(self.entries), reasons))
        return True

    def _new(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, Any] | None:
        """What a call returns on a graph that is captured for it; None where only eager PyTorch can tell."""
        self._check(call)
        kwargs = self.inspector.ordered(kwargs)
        taken = self._numbers.take(call, [e.call for e in self.entries], self.inspector)
        if taken is None:
            return self._on_new_graph(call, args, kwargs)
        try:
            wider = self.inspector.call(args, kwargs, self._numbers.arguments)
            served = self._served(wider, args, kwargs) or self._on_new_graph(wider, args, kwargs)
        except CaptureError as error:
            _LOG.info("a number that varies steers the forward pass, so each value has a graph: %s", error.what)
            self._numbers.keep_apart(taken, self.inspector)
            call = self.inspector.call(args, kwargs, self._numbers.arguments)
            return self._on_new_graph(call, args, kwargs)
        except Exception:  # the module's own
            self._numbers.give_back(taken, self.inspector)
            raise
        if served is not None and taken.steer(served[0].captured.path):
            self._numbers.keep_apart(taken, self.inspector)
        return served

    def _on_new_graph(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, Any] | None:
        with uncollected():
            entry = self._capture(call, args, kwargs)
            try:
                return None if entry is None else self._run(entry, call, args, kwargs)
            except MissedError:  # what it computes is off by a rounding error, which decides
                return None

    def _capture(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """A graph for a call; None where eager PyTorch alone can tell what it returns."""
        try:
            return self._captured(call, args, kwargs)
        except NumberError as error:
            if not count(self.module, error.places):
                raise
            self.inspector.look_again()
            return self._capture(self.inspector.call(args, kwargs, self._numbers.arguments), args, kwargs)
        except HostRandomError as error:
            drawn = error
            if not drawn.source:
                source = line_that_draws(self.module, args, kwargs, self.options.ignored_attributes)
                drawn = HostRandomError(error.generator, source)
            if str(drawn) not in map(str, self.without_graph.values()):
                _LOG.warning("%s runs in eager PyTorch: %s", type(self.module).__name__, drawn)
            self.without_graph[call.form] = drawn
            return None
        except CaptureError as error:
            if error.__cause__ is None or isinstance(error.__cause__, OnnxTrainError):
                raise
            if (own := self._raised(args, kwargs)) is None:
                raise
            raise as_raised_by(own, error) from own

    def _captured(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """A graph for a call; where the call looks into tensors, for what it sees there, which eager PyTorch tells.

        None where the forward pass raises.
        """
        if not self._looks:
            try:
                return self._record(call, args, kwargs, Answers())
            except ContentError as error:
                refused: ContentError | None = unless_in_shards(self.module, error)
        else:
            refused = None
        answers = self._rehearse(args, kwargs, call.schema.numbers)
        known = None if answers is None else self._known(call, answers)
        if answers is None or known is not None:
            return known
        if refused is not None and not answers.looks and not answers.sizes:
            raise refused
        self._looks = True
        fresh = varying([e.path for e in self.entries if e.path], answers) - self._free - self._constant
        given = frozenset(key for key in answers.by_key if key[0] == ARGUMENT)
        for free in filter(None, dict.fromkeys((self._free | fresh, self._free | given))):
            try:
                return self._record(call, args, kwargs, dataclasses.replace(answers, free=free))
            except CaptureError as error:
                if isinstance(error, NumberError) and error.places:
                    raise
                if given and free <= self._free | given:
                    raise  # each has a graph
                _LOG.info("numbers that %s reads stay constants: %s", type(self.module).__name__, error.what)
                self._constant |= free - self._free - given
        try:
            return self._record(call, args, kwargs, answers)
        except NumberError as error:  # a graph leaves it at each call where it may be any
            if free := integers(answers):
                with contextlib.suppress(CaptureError):
                    return self._record(call, args, kwargs, dataclasses.replace(answers, free=free))
            raise error from None

    def _known(self, call: Call, answers: Answers) -> Entry | None:
        """The graph that there is already for what a call sees, which may compute it with an error that decides."""
        shapes = [t.shape for t in call.tensors]
        paths = [e for e in self._fitting(call) if e.path]
        return next((e for e in paths if answers.agree(e.path.looks, e.path.conditions, shapes)), None)

    def _raised(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """What a call raises in eager PyTorch, too; None where it does not."""
        try:
            self._rehearsed(args, kwargs)
        except Exception as error:
            return error
        return None

    def _rehearsed(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Collection[int] = ()) -> Answers:
        """What a call sees in tensors, by random numbers that are drawn again.

        Raises:
            Exception: what the module raises.
        """
        with randomness.replayed(randomness.state()):
            return rehearse(self.module, args, kwargs, self.options.ignored_attributes, numbers, around=discovery)

    def _rehearse(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Collection[int]) -> Answers | None:
        """What a call sees in tensors; None where it raises."""
        _LOG.info("rehearses %s: a call in eager PyTorch, to see what it looks at", type(self.module).__name__)
        try:
            return self._rehearsed(args, kwargs, numbers)
        except OnnxTrainError:
            raise
        except Exception as error:
            _LOG.info("the rehearsal stopped: %s", error)
            return None

    def _record(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers) -> Entry:
        reasons = self._reasons(call, answers)
        _LOG.info("captures %s: %s", type(self.module).__name__, "; ".join(reasons))
        named = names_read(self.module, self.options.ignored_attributes)
        before, attributes = Contents(named, self.module), settled(self.module)
        session = Session(self.module, args, kwargs, self.options, self._numbers.arguments, answers)
        session.agree(self.calls)
        self._sets(before.changed())
        self.inspector.leaves(session.captured)
        # what the forward pass sets on its own (a configuration's problem_type) is no reason to capture it again, but
        # where it may be read first
        after = dataclasses.replace(call.form, state=self.inspector.state())
        flips = any(place.kind is Kind.FLIP for place in session.captured.left)
        flips |= settles(attributes, self.module, session.captured.read)
        self._left_unread.learn(session.captured)
        read = [*collections_read(self.module, session.captured, self._left_unread.places), *named]
        contents = Contents(read, self.module).without(self._set)
        entry = Entry(call.form if flips else after, session, self.calls, reasons, contents)
        self.entries.append(entry)
        for key in {call.form, entry.call}:
            self._replace(key, entry, answers.free)
        if len(self.entries) == _MANY and not entry.path:
            _LOG.warning(
                "%s has %d graphs by now, each captured anew; the last one because %s (model.explain() lists all)",
                *(type(self.module).__name__, _MANY, "; ".join(reasons)),
            )
        return entry

    def _sets(self, labels: Iterable[str]) -> None:
        """A call sets global names, or what is in them, by itself: in a cache, say, which is no reason for a graph."""
        if fresh := {*labels} - self._set:
            self._set |= fresh
            for entry in self.entries:
                entry.contents = entry.contents.without(fresh)

    def _replace(self, call: Call, entry: Entry, free: frozenset[Key]) -> None:
        """Add a graph to those of a call; those for one number that may be any now are no longer looked for."""
        self._free |= free
        kept = [e for e in self._by_call.get(call, ()) if not any(look.key in free for look in e.path.looks)]
        self._by_call[call] = [*kept, entry]

    def _reasons(self, call: Call, answers: Answers) -> list[str]:
        """Why no graph serves a call: how it differs from the earlier call it is nearest to."""
        if not self.entries:
            return ["it is the first call"]
        others = [e.path for e in self._fitting(call) if e.path]
        if others:
            return [difference(others[0], answers)]
        alike = [e for e in self.entries if e.call.schema.spec == call.schema.spec] or self.entries
        return min((differences(e.call, e.contents, call, self.inspector) for e in reversed(alike)), key=len)
