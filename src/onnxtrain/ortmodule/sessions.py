"""All graphs of one module: the one that serves a call, or a new one, and why there had to be a new one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import Kind
from onnxtrain.errors import CaptureError
from onnxtrain.options import Options
from onnxtrain.ortmodule.checks import check_devices, check_hooks, check_sharding
from onnxtrain.ortmodule.guards import Call, Inspector
from onnxtrain.ortmodule.session import Session

_LOG = logging.getLogger(__name__)
_MANY = 8  # graphs of one module after which something is said


@dataclasses.dataclass
class Entry:
    """One graph: the call it was captured for, the number of that call, why, and how many calls it served."""

    call: Call
    session: Session
    first: int
    reasons: list[str]
    served: int = 0


class Sessions:
    """The graphs of a module, found by what a call looks like.

    Args:
        module: the user's module.
        options: backend and checks.

    Attributes:
        entries: all graphs, in the order of their capture.
        calls: how many calls there were.
        constants: how many times a number that varies had to stay a constant.
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self.module, self.options = module, options
        self.inspector = Inspector(module, options.ignored_attributes)
        self.entries: list[Entry] = []
        self.calls = 0
        self._latest: Entry | None = None
        self._by_call: dict[Call, list[Entry]] = {}
        self._numbers: dict[pytree.TreeSpec, frozenset[int]] = {}
        self._fixed: dict[pytree.TreeSpec, frozenset[int]] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, list[torch.Tensor]]:
        """The graph for a call and the call's tensors; captured where there is none.

        Raises:
            UnsupportedDataError: an input has a type that a graph cannot take.
            DeviceError: there is more than one device.
            ModuleError: a submodule has a hook that would be lost, or a parameter is not whole.
            CaptureError: the module cannot be captured; names the source line.
        """
        self.calls += 1
        call = self.inspector.call(args, kwargs, self._numbers)
        entry = self._latest
        if entry is None or entry.call != call or not entry.session.fits(call.tensors):
            entry = self._latest = self._fitting(call) or self._new(call, args, kwargs)
        entry.served += 1
        return entry.session, entry.call.tensors if entry.first == self.calls else call.tensors

    def _fitting(self, call: Call) -> Entry | None:
        return next((e for e in self._by_call.get(call, ()) if e.session.fits(call.tensors)), None)

    def _new(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        check_sharding(self.module)
        check_hooks(self.module, self.options.hooks)
        check_devices(self.module, call.tensors)
        spec, varying = call.schema.spec, self._varying_numbers(call)
        if not varying:
            return self._capture(call, args, kwargs)
        before = self._numbers.get(spec, frozenset())
        self._numbers[spec] = before | varying
        try:
            wider = self.inspector.call(args, kwargs, self._numbers)
            return self._fitting(wider) or self._capture(wider, args, kwargs)
        except CaptureError as error:
            _LOG.info("a number among the inputs steers the forward pass, so each value has a graph: %s", error.what)
            self._numbers[spec] = before
            self._fixed[spec] = self._fixed.get(spec, frozenset()) | varying
            return self._capture(call, args, kwargs)

    def _varying_numbers(self, call: Call) -> frozenset[int]:
        """Positions of numbers that had another value in an earlier call of the same structure."""
        spec = call.schema.spec
        now = {i: v for i, v in call.schema.constants if isinstance(v, int | float) and not isinstance(v, bool)}
        earlier = [dict(e.call.schema.constants) for e in self.entries if e.call.schema.spec == spec]
        varying = {i for i, v in now.items() for constants in earlier if i in constants and constants[i] != v}
        return frozenset(varying - self._fixed.get(spec, frozenset()))

    def _capture(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        reasons = self._reasons(call)
        _LOG.info("captures %s: %s", type(self.module).__name__, "; ".join(reasons))
        session = Session(self.module, args, dict(sorted(kwargs.items())), self.options, self._numbers)
        if session.captured.left:
            self.inspector.leaves(session.captured.left)
        # what the forward pass sets on its own (a configuration's problem_type) is no reason to capture it again, but
        # where it was something else before: it may be read first
        after = dataclasses.replace(call, state=self.inspector.state())
        flips = any(place.kind is Kind.FLIP for place in session.captured.left)
        entry = Entry(call if flips else after, session, self.calls, reasons)
        self.entries.append(entry)
        for key in {call, entry.call}:
            self._by_call.setdefault(key, []).append(entry)
        if len(self.entries) == _MANY:
            _LOG.warning(
                "%s has %d graphs by now, each captured anew; the last one because %s (model.explain() lists all)",
                *(type(self.module).__name__, _MANY, "; ".join(reasons)),
            )
        return entry

    def _reasons(self, call: Call) -> list[str]:
        """Why no graph serves a call: how it differs from the earlier call it is nearest to."""
        if not self.entries:
            return ["it is the first call"]
        alike = [e for e in self.entries if e.call.schema.spec == call.schema.spec] or self.entries
        return min((self._differences(entry.call, call) for entry in reversed(alike)), key=len)

    def _differences(self, old: Call, new: Call) -> list[str]:
        found = []
        if old.schema.spec != new.schema.spec:
            found += _structure_changes(old, new)
        elif old.schema != new.schema:
            found += list(_value_changes(old, new))
        elif old.inputs != new.inputs:
            found += list(_tensor_changes(old.inputs, new.inputs))
        if old.state != new.state:
            found += self.inspector.changes(old.state, new.state)
        if old.ambient != new.ambient:
            found.append("autocast, the default dtype or determinism was switched")
        return found or ["sizes differ that the forward pass compares, or needs as constants"]


def _structure_changes(old: Call, new: Call) -> list[str]:
    a, b = _leaves(old), _leaves(new)
    found = [f"input {name} is new" for name in b if name not in a]
    found += [f"input {name} is missing" for name in a if name not in b]
    return found or ["the structure of the inputs is another"]


def _value_changes(old: Call, new: Call) -> list[str]:
    a, b = dict(old.schema.constants), dict(new.schema.constants)
    names = _leaves(new)
    found = []
    for i in sorted({*a, *b}):
        before, now = repr(a[i]) if i in a else "a tensor", repr(b[i]) if i in b else "a tensor"
        if before != now:
            found.append(f"input {names[i]} is {now} and was {before}")
    return found or ["a number among the inputs became a tensor"]


def _leaves(call: Call) -> list[str]:
    """What the caller would call each leaf of the inputs: ``args[0]``, ``labels``, ``batch['ids'][1]``."""
    spec = call.schema.spec
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    return [_name(path) for path, _ in paths]


def _name(path: Sequence[Any]) -> str:
    where, *rest = path[0].idx, *path[1:]
    if where == 0:
        return f"args{pytree.keystr(tuple(rest))}"
    return f"{rest[0].key}{pytree.keystr(tuple(rest[1:]))}"


def _tensor_changes(old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    found = []
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        for name, x, y in zip(("dtype", "rank", "device"), a, b, strict=True):
            if x != y:
                found.append(f"{name} of input tensor {i} is {y} and was {x}")
    return found or ["the number of input tensors is another"]
