"""Items that a forward pass takes of iterators, and names that it sets first of all: no graph does either again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError, SetUpError

UNTAKEN = itertools.count(1)


def numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


GLOBAL = {
    "a list": lambda: iter([1, 2, 3]),
    "a range": lambda: iter(range(1, 9)),
    "a dict": lambda: iter({1: 1, 2: 2}),
    "a generator": numbers,
    "an expression": lambda: (n for n in range(1, 9)),
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle([1, 2]),
    "chain": lambda: itertools.chain([1, 2], [3]),
    "islice": lambda: itertools.islice(itertools.count(1), 9),
    "map": lambda: map(abs, [1, 2, 3]),
    "zip": lambda: (a for a, _ in zip(range(1, 9), range(9), strict=False)),
    "reversed": lambda: reversed([1, 2, 3]),
}
COUNTER: Iterator[Any] = iter(())


class Times(nn.Module):
    """Its layer times what a function gives."""

    def __init__(self, factor: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 2), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor()


class OfGlobal(Times):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(COUNTER)


class OfClass(Times):
    count = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(self.count)


class OfDefault(Times):
    def forward(self, x: Tensor, count: Iterator[int] = itertools.count(1)) -> Tensor:  # noqa: B008
        return self.linear(x) * next(count)


class OfList(Times):
    def __init__(self) -> None:
        super().__init__()
        self.held = [itertools.count(1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(self.held[0])


def of_closure() -> Times:
    count = itertools.count(1)
    return Times(lambda: next(count))


PLACES = {
    "class": OfClass,
    "default": OfDefault,
    "list": OfList,
    "closure": of_closure,
    "bound": lambda: Times(iter([1, 2, 3]).__next__),
    "partial": lambda: Times(functools.partial(next, iter([1, 2, 3]))),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_items_of_an_iterator_under_a_global_name_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "COUNTER", GLOBAL[name]())
    with pytest.raises(CaptureError, match="reads the iterator COUNTER") as raised:
        ORTModule(OfGlobal())(torch.randn(3, 4))
    assert "test_taken_items.py" in raised.value.source or not raised.value.source


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_whatever_was_taken_before(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle goes through a list from its second time on."""
    cycle = itertools.cycle([1, 2])
    for _ in range(taken):
        next(cycle)
    monkeypatch.setitem(globals(), "COUNTER", cycle)
    with pytest.raises(CaptureError, match="reads the iterator COUNTER"):
        ORTModule(OfGlobal())(torch.randn(3, 4))


@pytest.mark.parametrize("name", PLACES)
def test_wherever_it_is(name: str) -> None:
    with pytest.raises(CaptureError, match="reads the iterator"):
        ORTModule(PLACES[name]())(torch.randn(3, 4))


class Mentions(Times):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (next(UNTAKEN) if x.shape[1] > 99 else 2)


def test_one_that_is_mentioned_may_be_there() -> None:
    wrapped, x = ORTModule(Mentions()), torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(wrapped(x), wrapped.linear(x) * 2)
    assert next(UNTAKEN) == 1


def test_fallback_takes_the_next_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "COUNTER", itertools.count(1))
    wrapped, x = ORTModule(OfGlobal(), options=Options(fallback="eager")), torch.randn(3, 4)
    factors = [(wrapped(x) / wrapped.linear(x)).mean().item() for _ in range(3)]
    assert factors[2] - factors[1] == pytest.approx(1.0)


def helper() -> float:
    return 3.0


def other_helper() -> float:
    return 3.0


class SetsOnFunction(Times):
    def forward(self, x: Tensor) -> Tensor:
        helper.count = getattr(helper, "count", 0) + 1  # type: ignore[attr-defined]
        return self.linear(x) * helper.count  # type: ignore[attr-defined]


class SetsOnClass(Times):
    def forward(self, x: Tensor) -> Tensor:
        type(self).count = getattr(self, "count", 0) + 1  # type: ignore[attr-defined]
        return self.linear(x) * self.count


class SetsGlobal(Times):
    def forward(self, x: Tensor) -> Tensor:
        global MADE
        try:
            MADE += 1
        except NameError:
            MADE = 1
        return self.linear(x) * MADE


@pytest.mark.parametrize("kind", [SetsOnFunction, SetsOnClass, SetsGlobal])
def test_what_is_set_first_of_all_and_counts_on_is_refused(kind: type[Times]) -> None:
    """The first call runs in eager PyTorch, for it may set up something; the second shows that it counts."""
    wrapped, x = ORTModule(kind()), torch.randn(3, 4)
    assert torch.equal(wrapped(x), wrapped.linear(x))
    with pytest.raises(SetUpError, match="from 1 to 2"):
        wrapped(x)


class SetsOnce(Times):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(other_helper, "value"):
            other_helper.value = other_helper()  # type: ignore[attr-defined]
        return self.linear(x) * other_helper.value  # type: ignore[attr-defined]


def test_what_is_set_once_is_set_by_the_first_call() -> None:
    wrapped, x = ORTModule(SetsOnce()), torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), wrapped.linear(x) * 3)
    assert other_helper.value == 3.0  # type: ignore[attr-defined]
    assert "1 graph" in wrapped.explain()
