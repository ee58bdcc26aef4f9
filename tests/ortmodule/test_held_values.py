"""Values that a module holds: another one is another graph, wherever it is; what a graph cannot change is refused."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import decimal
import fractions
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parity import same_step

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError, NumberError
from onnxtrain.ortmodule.values import shown, told_apart

Tensor = torch.Tensor
Record = collections.namedtuple("Record", "held")


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclasses.dataclass
class Fields:
    held: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Any


class Scaled:
    """A function with a number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.number

    def method(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * self.number


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda v: v, lambda h: h),
    "in a tuple": (lambda v: (v,), lambda h: h[0]),
    "in a list": (lambda v: [v], lambda h: h[0]),
    "in a dict": (lambda v: {"held": v}, lambda h: h["held"]),
    "in a named tuple": (Record, lambda h: h.held),
    "in an object": (Box, lambda h: h.held),
    "in slots": (Slots, lambda h: h.held),
    "in a dataclass": (Fields, lambda h: h.held),
    "in a frozen dataclass": (Frozen, lambda h: h.held),
    "in a namespace": (lambda v: types.SimpleNamespace(held=v), lambda h: h.held),
    "in an object in a list": (lambda v: [Box(v)], lambda h: h[0].held),
    "in an object in a tuple": (lambda v: (Box(v),), lambda h: h[0].held),
}
WITHIN: dict[str, Callable[[Any, Any], None]] = {
    "in a list": lambda h, v: h.__setitem__(0, v),
    "in a dict": lambda h, v: h.__setitem__("held", v),
    "in an object": lambda h, v: setattr(h, "held", v),
    "in slots": lambda h, v: setattr(h, "held", v),
    "in a dataclass": lambda h, v: setattr(h, "held", v),
    "in a namespace": lambda h, v: setattr(h, "held", v),
    "in an object in a list": lambda h, v: setattr(h[0], "held", v),
    "in an object in a tuple": lambda h, v: setattr(h[0], "held", v),
}
VALUES: dict[str, list[Any]] = {
    "functions of torch": [torch.tanh, torch.sigmoid, torch.tanh],
    "functions": [torch.nn.functional.silu, torch.nn.functional.gelu, torch.tanh],
    "methods": [Scaled(2.0).method, Scaled(3.0).method],
    "objects that are called": [Scaled(2.0), Scaled(3.0)],
    "bound arguments": [functools.partial(torch.clamp, min=0.1), functools.partial(torch.clamp, min=0.3)],
    "numbers": [1, 2.0, True, 3],
    "numbers of equal value": [1, 1.0, True],
    "numbers of numpy": [np.int64(1), np.float32(2.0), np.int64(3)],
    "fractions": [fractions.Fraction(1, 3), fractions.Fraction(1, 2), decimal.Decimal("0.25")],
    "sets": [frozenset((1, 2)), frozenset((2, 3))],
    "ranges": [range(2), range(3)],
    "slices": [slice(0, 2), slice(1, 4)],
    "tensors": [torch.full((4,), 2.0), torch.full((4,), 3.0)],
}


class Holding(torch.nn.Module):
    def __init__(self, kind: str, value: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self._make, self._get = HOLDERS[kind]
        self.held = self._make(value)

    def forward(self, x: Tensor) -> Tensor:
        value, y = self._get(self.held), self.linear(x)
        if callable(value):
            return value(y)
        if isinstance(value, slice):
            return y[:, value]
        if isinstance(value, range | frozenset):
            return y * sum(value)
        if isinstance(value, int | float):  # of whole numbers they differ by their type
            return y * ((x * 10).long() * value / 2 + (0.5 if isinstance(value, float) else 0.0)) + isinstance(
                value, bool
            )
        return y * (value if isinstance(value, Tensor) else float(value))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kind", HOLDERS)
def test_another_value_is_another_graph(kind: str, values: str) -> None:
    first, *others = VALUES[values]
    module = Holding(kind, first)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    same_step(wrapped, eager, torch.randn(3, 4))
    for value in others:
        module.held, eager.held = module._make(value), eager._make(value)
        same_step(wrapped, eager, torch.randn(3, 4))
        if kind in WITHIN:
            for one in (module, eager):
                WITHIN[kind](one.held, first)
            same_step(wrapped, eager, torch.randn(2, 4))


def test_numbers_of_objects_that_are_called_and_of_layers() -> None:
    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))
            self.scaled = Scaled(1.0)

        def forward(self, x: Tensor) -> Tensor:
            y = self.scaled(self.last(self.linear(x)))
            return y * getattr(self.linear, "scale", 1.0) * getattr(self.last, "scale", 1.0)

    module = Called()
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    same_step(wrapped, eager, torch.randn(3, 4))
    for number in (2.0, 3.0):
        for name in ("linear", "last"):
            for one in (module, eager):
                one.scaled.number = number
                getattr(one, name).scale = number
            same_step(wrapped, eager, torch.randn(3, 4))


def test_values_that_are_told_apart_and_shown() -> None:
    nan = float("nan")
    for one, other in ((1, 1.0), (1, True), (0.0, -0.0), ((1,), [1]), (np.int64(1), 1), (range(2), range(3))):
        assert told_apart(one) != told_apart(other)
    for make in (
        lambda: nan * 1,
        lambda: np.float32(2),
        lambda: Fields([1]),
        lambda: {1: (2.0, {3})},
        lambda: slice(2),
    ):
        assert told_apart(make()) == told_apart(make()) and hash(told_apart(make())) == hash(told_apart(make()))
    assert shown(told_apart(-0.5)) == "-0.5" and shown(told_apart((1, "a"))) == "tuple(1, 'a')"
    assert shown(told_apart(torch.tanh)) == torch.tanh.__qualname__
    ring: list[Any] = []
    ring.append(ring)
    assert told_apart(ring) == told_apart(ring)


class Counting(torch.nn.Module):
    def __init__(self, held: Any, count: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self._count = torch.nn.Linear(4, 4), held, count

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self._count(self))


class Schedule:
    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> float:
        self.at += 1
        return 1.0 / self.at


class Table(dict[str, int]):
    """A class of somebody's."""


def _item(key: Any) -> Callable[[Any], Any]:
    def count(module: Any) -> Any:
        module.held[key] += 1
        return module.held[key]

    return count


def _nested(module: Any) -> Any:
    module.held["of"][0] += 1
    return module.held["of"][0]


def _replaced(module: Any) -> Any:
    module.held += type(module.held)(1)
    return module.held


def _rotated(module: Any) -> Any:
    module.held.rotate(1)
    return module.held[0]


COUNTED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an attribute": (lambda: 0, _replaced),
    "a float": (lambda: 0.5, _replaced),
    "an object's": (Schedule, lambda m: m.held()),
    "an object's in a list": (lambda: [Schedule()], lambda m: m.held[0]()),
    "an object's in a dict": (lambda: {1: Schedule()}, lambda m: m.held[1]()),
    "an object's in an object": (lambda: Box(Schedule()), lambda m: m.held.held()),
    "in a list": (lambda: [0], _item(0)),
    "in a dict": (lambda: {"n": 0}, _item("n")),
    "in a Counter": (lambda: collections.Counter(n=0), _item("n")),
    "in a table of defaults": (lambda: collections.defaultdict(int), _item("n")),
    "in a class made of a dict": (lambda: Table(n=0), _item("n")),
    "in a list in a dict": (lambda: {"of": [0]}, _nested),
    "in an object's dict": (lambda: Box({"of": [0]}), lambda m: _nested(m.held)),
    "in a queue": (lambda: collections.deque([1.0, 2.0, 3.0]), _rotated),
}


@pytest.mark.parametrize("name", COUNTED)
def test_numbers_that_a_call_counts(name: str) -> None:
    make, count = COUNTED[name]
    module = Counting(make(), count)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for _ in range(5):
        same_step(wrapped, eager, torch.randn(3, 4))
    assert float(count(module)) == float(count(eager))


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number of numpy": (lambda: np.int64(0), _replaced),
    "a fraction": (lambda: fractions.Fraction(0), _replaced),
    "in an array": (lambda: np.zeros(2), _item(1)),
    "in an array of Python": (lambda: array.array("l", [0, 0]), _item(1)),
    "in bytes": (lambda: bytearray(2), _item(1)),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_numbers_that_a_call_changes_are_refused_and_taken_back(name: str) -> None:
    make, count = COUNTERS[name]
    module = Counting(make(), count)
    with pytest.raises(NumberError, match="changes the number") as raised:
        ORTModule(module)(torch.randn(3, 4))
    assert raised.value.cure
    assert float(count(module)) == float(count(Counting(make(), count)))


@pytest.mark.parametrize("make", [lambda: itertools.count(1), lambda: itertools.cycle([1.0]), lambda: iter([1, 2, 3])])
def test_iterators_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match="reads the iterator held"):
        ORTModule(Counting(make(), lambda module: next(module.held)))(torch.randn(3, 4))


def test_what_a_call_exchanges_is_refused_or_set_again() -> None:
    def functions(module: Any) -> float:
        module.held = torch.sin if module.held is torch.cos else torch.cos
        return 1.0

    with pytest.raises(CaptureError, match="reads held and sets it to something else"):
        ORTModule(Counting(torch.cos, functions))(torch.randn(3, 4))

    def texts(module: Any) -> float:
        number = {"a": 1.0, "b": 2.0}[module.held]
        module.held = "b" if module.held == "a" else "a"
        return number

    module = Counting("a", texts)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for _ in range(5):
        same_step(wrapped, eager, torch.randn(3, 4))
        assert module.held == eager.held


def test_a_number_that_is_first_set_by_a_call_counts() -> None:
    def count(module: Any) -> int:
        module.linear.calls = getattr(module.linear, "calls", 0) + 1
        return module.linear.calls

    module = Counting(None, count)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for _ in range(5):
        same_step(wrapped, eager, torch.randn(3, 4))
    assert module.linear.calls == eager.linear.calls == 5


@pytest.mark.parametrize("make", [Box, Fields, lambda h: types.SimpleNamespace(held=h), lambda h: (h,), Record])
def test_tensors_that_a_call_leaves_for_the_next_one(make: Callable[[Any], Any]) -> None:
    """In a tuple they are state; in an object that each call makes they are refused."""

    def mean(module: Any) -> Any:
        leaves = (
            None if module.held is None else (module.held[0] if isinstance(module.held, tuple) else module.held.held)
        )
        return 1.0 if leaves is None else leaves.mean()

    class Leaving(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.held = torch.nn.Linear(4, 4), None

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) * mean(self)
            self.held = make(y.detach())
            return y

    module = Leaving()
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    if isinstance(make(torch.ones(1)), tuple):
        for _ in range(4):
            same_step(wrapped, eager, torch.randn(3, 4))
        torch.testing.assert_close(module.held, eager.held)
        return
    with pytest.raises(CaptureError, match="leaves a tensor outside"):
        for _ in range(2):
            wrapped(torch.randn(3, 4))
