"""What a forward pass reads by ways that no attribute shows: each call computes with what is there then."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from parity import captures
from torch import Tensor, nn

from onnxtrain import ORTModule

NUMBER = [1.0]


class Reads:
    """Reads a global name in each of its methods that Python calls by itself."""

    def __getitem__(self, index: int) -> float:
        return NUMBER[0]

    def __call__(self) -> float:
        return NUMBER[0]

    def __len__(self) -> int:
        return int(NUMBER[0])

    def __rmul__(self, other: float) -> float:
        return other * NUMBER[0]

    def __enter__(self) -> float:
        return NUMBER[0]

    def __exit__(self, *raised: object) -> None:
        pass

    def __iter__(self) -> Iterator[float]:
        return iter([NUMBER[0]])

    def __float__(self) -> float:
        return NUMBER[0]

    def __getattr__(self, name: str) -> float:
        if name != "number":
            raise AttributeError(name)
        return NUMBER[0]

    def __bool__(self) -> bool:
        return NUMBER[0] > 2

    def __contains__(self, other: object) -> bool:
        return NUMBER[0] > 2


class Descriptor:
    def __get__(self, instance: object, owner: type) -> float:
        return NUMBER[0]


class Has:
    described = Descriptor()


def entered(held: Reads) -> float:
    with held as number:
        return number


METHODS: dict[str, Callable[[Any], Any]] = {
    "item": lambda held: held[0],
    "call": lambda held: held(),
    "len": len,
    "product": lambda held: 2.0 * held,
    "with": entered,
    "for": lambda held: next(iter(held)),
    "float": float,
    "attribute": lambda held: held.number,
    "truth": lambda held: 2.0 if held else 1.0,
    "in": lambda held: 2.0 if 3 in held else 1.0,
    "made within": lambda held: Reads()[0],
    "descriptor": lambda held: Has().described,
}


class Times(nn.Module):
    """Its layer times what a function finds in what the module holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(4, 2), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self.held)


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_python_calls_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NUMBER", [1.0])
    module, x = Times(Reads(), METHODS[name]), torch.randn(3, 4)
    wrapped = ORTModule(module)
    for number in (1.0, 1.0, 3.0, 1.0):
        NUMBER[0] = number
        torch.testing.assert_close(wrapped(x), module(x))
    assert captures(wrapped) == 2


class Key:
    """A key that a dict does not keep alive."""


KEY = Key()
HOLDERS: dict[str, tuple[Callable[[dict[Any, float]], Any], Callable[[Any], float]]] = {
    "ChainMap": (lambda held: collections.ChainMap({}, held), lambda held: held[KEY]),
    "read-only": (types.MappingProxyType, lambda held: held[KEY]),
    "partial": (lambda held: functools.partial(lambda **given: given["d"][KEY], d=held), lambda held: held()),
    "in a list": (lambda held: [types.MappingProxyType(held)], lambda held: held[0][KEY]),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_shows_a_dict(name: str) -> None:
    make, read = HOLDERS[name]
    held = {KEY: 1.0}
    module, x = Times(make(held), read), torch.randn(3, 4)
    wrapped = ORTModule(module)
    for number in (1.0, 1.0, 3.0, 1.0):
        held[KEY] = number
        torch.testing.assert_close(wrapped(x), module(x))
    assert captures(wrapped) <= 3


@pytest.mark.parametrize("kind", [collections.UserDict, weakref.WeakKeyDictionary])
def test_dicts_that_are_objects(kind: Callable[[], Any]) -> None:
    held = kind()
    held[KEY] = 1.0
    module, x = Times(held, lambda held: held[KEY]), torch.randn(3, 4)
    wrapped = ORTModule(module)
    for number in (1.0, 3.0, 3.0, 1.0):
        held[KEY] = number
        torch.testing.assert_close(wrapped(x), module(x))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Python": (lambda: random.Random(0), lambda held: held.random()),
    "numpy": (lambda: numpy.random.default_rng(0), lambda held: float(held.random())),
    "numpy, older": (lambda: numpy.random.RandomState(0), lambda held: held.rand()),
    "torch": (lambda: torch.Generator().manual_seed(0), lambda held: torch.rand(2, generator=held)),
    "torch, normal": (lambda: torch.Generator().manual_seed(0), lambda held: torch.randn(2, generator=held)),
    "torch, in place": (lambda: torch.Generator().manual_seed(0), lambda held: torch.zeros(2).normal_(generator=held)),
    "torch, layout": (lambda: torch.Generator().manual_seed(0), lambda held: torch.randperm(2, generator=held)),
}
GENERATOR: Any = None


class OfGlobal(Times):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(GENERATOR)


@pytest.mark.parametrize(("name", "kind"), itertools.product(GENERATORS, (Times, OfGlobal)))
def test_generators_draw_on(name: str, kind: type[Times], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such calls run in eager PyTorch, and the first one draws as often as the others."""
    make, read = GENERATORS[name]
    found = []
    for wrap in (nn.Module.eval, ORTModule):
        torch.manual_seed(0)
        generator = make()
        monkeypatch.setitem(globals(), "GENERATOR", generator)
        called, x = wrap(kind(generator if kind is Times else None, read).eval()), torch.ones(3, 4)
        found.append([called(x).detach() for _ in range(3)])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


def test_the_generator_of_everybody_may_be_given() -> None:
    module = Times(None, lambda held: torch.rand(2, generator=torch.default_generator))
    wrapped, x, found = ORTModule(module), torch.ones(3, 4), []
    for called in (module, wrapped):
        torch.manual_seed(1)
        found.append([called(x).detach() for _ in range(3)])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)
    assert captures(wrapped) == 1
