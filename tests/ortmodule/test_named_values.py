"""Plain values under global names, of closures and classes that a forward pass changes: as eager, or an error."""

from __future__ import annotations

import collections
import copy
import functools
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parity import Applied, pair, same_step
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError

START: dict[str, Any] = {
    "COUNT": 0,
    "SCALE": 1.0,
    "IS_FIRST": True,
    "MODE": "cold",
    "TABLE": None,
    "LATEST": 0.0,
    "DEPTH": 0,
    "NUMBER": 0,
    "STATS": {"calls": 0, "inner": [1, 2]},
    "ARRAY": np.zeros(2),
    "SETTINGS": types.SimpleNamespace(step=1, inner=types.SimpleNamespace(step=1)),
    "MISSES": 0,
    "CACHE": {},
    "LOG": [],
    "LATELY": collections.deque(maxlen=3),
    "SEEN": set(),
    "BY_NAME": {},
}
_COMPARED = ("COUNT", "SCALE", "IS_FIRST", "MODE", "DEPTH", "NUMBER", "STATS", "MISSES", "CACHE", "SEEN")
COUNT: Any = START["COUNT"]
SCALE: Any = START["SCALE"]
IS_FIRST: Any = START["IS_FIRST"]
MODE: Any = START["MODE"]
TABLE: Any = START["TABLE"]
LATEST: Any = START["LATEST"]
DEPTH: Any = START["DEPTH"]
NUMBER: Any = START["NUMBER"]
STATS: Any = START["STATS"]
ARRAY: Any = START["ARRAY"]
SETTINGS: Any = START["SETTINGS"]
MISSES: Any = START["MISSES"]
CACHE: Any = START["CACHE"]
LOG: Any = START["LOG"]
LATELY: Any = START["LATELY"]
SEEN: Any = START["SEEN"]
BY_NAME: Any = START["BY_NAME"]


@pytest.fixture(autouse=True)
def _as_at_the_start() -> Iterator[None]:
    _start()
    yield


def _start() -> None:
    globals().update(copy.deepcopy(START))
    OfAClass.calls = 0


class Layer(nn.Module):
    """Does something with numbers under names beside a product."""

    def __init__(self, do: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(3, 3), do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self.linear(x))


class OfAClass(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.linear(x) * self.calls


def _sets(y: Tensor) -> Tensor:
    global SCALE
    SCALE = 0.5
    return y * SCALE


def _sets_after_it_is_read(y: Tensor) -> Tensor:
    global SCALE
    y, SCALE = y * SCALE, 0.25
    return y


def _does_otherwise_at_first(y: Tensor) -> Tensor:
    global IS_FIRST
    factor, IS_FIRST = 2.0 if IS_FIRST else 1.0, False
    return y * factor


def _warms_up(y: Tensor) -> Tensor:
    global MODE
    y = y + 1 if MODE == "cold" else y * 3
    MODE = "warm"
    return y


def _makes_a_table(y: Tensor) -> Tensor:
    global TABLE, MODE
    if MODE == "cold":
        TABLE, MODE = torch.arange(3.0), "warm"
    return y * TABLE


def _stamps(y: Tensor) -> Tensor:
    global LATEST
    LATEST = time.time()
    return y.tanh()


def _enters_and_leaves(y: Tensor) -> Tensor:
    """A look at a content ends the first trace in between."""
    global DEPTH
    DEPTH += 1
    y = y * DEPTH + 1 if y.sum() > 0 else y * DEPTH
    DEPTH -= 1
    return y


def _logs(y: Tensor) -> Tensor:
    LOG.append("a call")
    return y.tanh()


def _counts_what_a_cache_lacks(y: Tensor) -> Tensor:
    global MISSES
    width = y.shape[1]
    if width not in CACHE:
        MISSES += 1
        CACHE[width] = width * 2
    return y * CACHE[width]


def _keeps_numbers_of_a_batch(y: Tensor) -> Tensor:
    size = y.shape[0]
    if size not in CACHE:
        CACHE[size] = size * 2.0
    return y * CACHE[size]


def _keeps_tensors_of_a_batch(y: Tensor) -> Tensor:
    """What has been seen and what is kept are left by the same call."""
    size = y.shape[0]
    if size not in SEEN:
        SEEN.add(size)
        CACHE[size] = torch.arange(float(size))
    return y * CACHE[size][:, None]


def _grows_for_a_while(y: Tensor) -> Tensor:
    if len(SEEN) < 2:
        SEEN.add(len(SEEN))
    return y * len(SEEN)


def _numbers_layers(y: Tensor) -> Tensor:
    global NUMBER
    NUMBER = 0
    for _ in range(3):
        NUMBER += 1
        y = y.tanh() * NUMBER
    return y


AS_EAGER = (
    *(_sets, _sets_after_it_is_read, _does_otherwise_at_first, _warms_up, _makes_a_table, _stamps, _enters_and_leaves),
    *(_logs, _counts_what_a_cache_lacks, _numbers_layers),
    *(_keeps_numbers_of_a_batch, _keeps_tensors_of_a_batch, _grows_for_a_while),
)


def _run(module: nn.Module, do: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = []
    for step in range(5):
        x = torch.randn(3 + step % 2, 3, generator=torch.Generator().manual_seed(step))
        found.append(do(x))
        assert module.training
    return found


@pytest.mark.parametrize("do", AS_EAGER, ids=lambda do: do.__name__.strip("_").replace("_", " "))
def test_as_eager(do: Callable[[Tensor], Tensor]) -> None:
    module = Layer(do)
    expected = _run(module, module)
    there = {name: repr(globals()[name]) for name in _COMPARED}
    _start()
    wrapped = ORTModule(module, options=Options(summary=False))
    for ours, its in zip(_run(module, wrapped), expected, strict=True):
        torch.testing.assert_close(ours, its)
    assert {name: repr(globals()[name]) for name in _COMPARED} == there
    told = wrapped.explain()
    assert re.match(r"5 calls, (1 graph|2 graphs)\n(1 call in eager PyTorch, which set the module up\n)?graph 1:", told)


def _counts(y: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return y * COUNT


def _counts_in_a_table(y: Tensor) -> Tensor:
    STATS["calls"] += 1
    return y * STATS["calls"]


def _counts_in_a_list_of_a_table(y: Tensor) -> Tensor:
    STATS["inner"][1] += 1
    return y * STATS["inner"][1]


def _counts_in_an_array(y: Tensor) -> Tensor:
    ARRAY[1] += 1
    return y * float(ARRAY[1])


def _counts_in_settings(y: Tensor) -> Tensor:
    SETTINGS.step += 1
    return y * SETTINGS.step


def _counts_deep_in_settings(y: Tensor) -> Tensor:
    SETTINGS.inner.step += 1
    return y * SETTINGS.inner.step


def _counts_after_a_look(y: Tensor) -> Tensor:
    if y.sum() > 0:
        y = y + 1
    return _counts(y)


def _reads_a_list(y: Tensor) -> Tensor:
    LOG.append(1)
    return y * len(LOG)


def _reads_a_list_before(y: Tensor) -> Tensor:
    y = y * (1 + len(LOG))
    LOG.append(1)
    return y


def _reads_a_list_of_sizes(y: Tensor) -> Tensor:
    LOG.append(y.shape[0])
    return y * sum(LOG)


def _reads_a_queue(y: Tensor) -> Tensor:
    LATELY.append(len(LATELY) + 1)
    return y * sum(LATELY)


def _reads_a_set(y: Tensor) -> Tensor:
    SEEN.add(len(SEEN))
    return y * len(SEEN)


def _reads_a_table(y: Tensor) -> Tensor:
    BY_NAME[len(BY_NAME)] = 1.0
    return y * sum(BY_NAME.values())


def _takes_from_a_list(y: Tensor) -> Tensor:
    if not LOG:
        LOG.extend(range(9))
    return y * LOG.pop()


def _reads_a_list_after_a_look(y: Tensor) -> Tensor:
    return _reads_a_list(y + 1 if y.sum() > 0 else y)


def _of_a_default() -> Callable[[Tensor], Tensor]:
    def do(y: Tensor, held: list[int] = []) -> Tensor:  # noqa: B006 (what is tested)
        held.append(1)
        return y * len(held)

    return do


def _list_of_a_closure() -> Callable[[Tensor], Tensor]:
    held: list[int] = []

    def do(y: Tensor) -> Tensor:
        held.append(1)
        return y * len(held)

    return do


def _of_a_closure() -> Callable[[Tensor], Tensor]:
    calls = 0

    def do(y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return y * calls

    return do


def _decorated() -> Callable[[Tensor], Tensor]:
    numbers = [0]

    def do(y: Tensor) -> Tensor:
        numbers[0] += 1
        return y * numbers[0]

    @functools.wraps(do)
    def wrapper(y: Tensor) -> Tensor:
        return do(y)

    return wrapper


COUNTERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a global number": (lambda: Layer(_counts), "COUNT"),
    "in a table": (lambda: Layer(_counts_in_a_table), "STATS['calls']"),
    "in a list of a table": (lambda: Layer(_counts_in_a_list_of_a_table), "STATS['inner'][1]"),
    "in an array": (lambda: Layer(_counts_in_an_array), "ARRAY[1]"),
    "in settings": (lambda: Layer(_counts_in_settings), "SETTINGS.step"),
    "deep in settings": (lambda: Layer(_counts_deep_in_settings), "SETTINGS.inner.step"),
    "after a look": (lambda: Layer(_counts_after_a_look), "COUNT"),
    "of a closure": (lambda: Layer(_of_a_closure()), "calls"),
    "of a decorated function": (lambda: Layer(_decorated()), "numbers[0]"),
    "of a class": (lambda: OfAClass(torch.tanh), "OfAClass.calls"),
}


@pytest.mark.parametrize("case", COUNTERS.values(), ids=COUNTERS)
def test_a_number_that_every_call_changes_is_an_error(case: tuple[Callable[[], nn.Module], str]) -> None:
    """The first call is eager's, as the number might be set once; the next is an error, and has not counted."""
    _is_refused_from_the_second_call_on(*case, "from")


GROWING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a list": (lambda: Layer(_reads_a_list), "LOG"),
    "a list that is read before": (lambda: Layer(_reads_a_list_before), "LOG"),
    "a list of sizes": (lambda: Layer(_reads_a_list_of_sizes), "LOG"),
    "a list that shrinks": (lambda: Layer(_takes_from_a_list), "LOG"),
    "a queue": (lambda: Layer(_reads_a_queue), "LATELY"),
    "a set": (lambda: Layer(_reads_a_set), "SEEN"),
    "a table": (lambda: Layer(_reads_a_table), "BY_NAME"),
    "after a look": (lambda: Layer(_reads_a_list_after_a_look), "LOG"),
    "a default": (lambda: Layer(_of_a_default()), "held"),
    "a list of a closure": (lambda: Layer(_list_of_a_closure()), "held"),
}


@pytest.mark.parametrize("case", GROWING.values(), ids=GROWING)
def test_what_every_call_adds_to_and_reads_is_an_error(case: tuple[Callable[[], nn.Module], str]) -> None:
    """Not so a cache, to which a second call adds nothing."""
    _is_refused_from_the_second_call_on(*case, "than before")


def _is_refused_from_the_second_call_on(make: Callable[[], nn.Module], label: str, how: str) -> None:
    eager, ours, x = make(), make(), torch.randn(4, 3)
    ours.load_state_dict(eager.state_dict())
    expected = [eager(x), eager(x)]
    _start()
    wrapped = ORTModule(ours, options=Options(summary=False))
    torch.testing.assert_close(wrapped(x), expected[0])
    with pytest.raises(CaptureError) as caught:
        wrapped(x)
    assert f"{label} {how}" in str(caught.value) and f"{__file__}:" in str(caught.value)
    assert "ignored_attributes" in str(caught.value)
    torch.testing.assert_close(ours(x), expected[1])


@pytest.mark.parametrize("name", ["COUNT", "calls"])
def test_what_is_named_as_no_matter_is_no_error(name: str) -> None:
    module = Layer(_counts if name == "COUNT" else _of_a_closure())
    wrapped = ORTModule(module, options=Options(summary=False, ignored_attributes=(name,)))
    for _ in range(3):
        wrapped(torch.randn(4, 3))


def test_a_number_that_a_call_sets_may_be_set_by_others() -> None:
    """It is compared like every other: the next call is one of the new number."""

    def do(y: Tensor) -> Tensor:
        global SCALE
        if SCALE is None:
            SCALE = 2.0
        return y * SCALE

    module = Layer(do)
    wrapped, x = ORTModule(module, options=Options(summary=False)), torch.randn(4, 3)
    for scale in (None, 3.0, 4.0, 3.0):
        globals()["SCALE"] = scale
        expected = module(x)
        globals()["SCALE"] = scale
        torch.testing.assert_close(wrapped(x), expected)


FACTOR = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


class Strategy:
    def apply(self, x: Tensor) -> Tensor:
        return x * FACTOR


FUNCTIONS: dict[str, Any] = {"function": scaled, "object": Strategy(), "nested": [[scaled]]}
LOOKED_UP: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda y: FUNCTIONS["function"](y),
    "object": lambda y: FUNCTIONS["object"].apply(y),
    "nested": lambda y: FUNCTIONS["nested"][0][0](y),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_what_functions_in_a_table_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, eager = pair(Applied(LOOKED_UP[name]))
    same_step(wrapped, eager, torch.randn(5, 4))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    same_step(wrapped, eager, torch.randn(5, 4))
