"""Collections that a call changes and reads: a graph serves the calls that find in them what it has read."""

from __future__ import annotations

import collections
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import captures

from onnxtrain import Options, ORTModule

Tensor = torch.Tensor
Case = tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], float]]


def _set(held: Any, key: Any, value: Any) -> None:
    held[key] = value


# what there is at first, what a call does to it with a number, and what it computes from it
CASES: dict[str, Case] = {
    "a number at the end": (lambda: [0], lambda h, n: h.append(h[-1] + n), lambda h: h[-1]),
    "how much there is": (list, lambda h, n: h.append(n), len),
    "a sum": (list, lambda h, n: h.append(n), sum),
    "the latest three": (lambda: collections.deque(maxlen=3), lambda h, n: h.append(n), sum),
    "a set": (set, lambda h, n: h.add(len(h)), len),
    "a set of which one is taken": (lambda: {*range(9)}, lambda h, n: h.discard(len(h) - 1), len),
    "a dict that grows": (dict, lambda h, n: _set(h, len(h), n), len),
    "a dict of which one is taken": (lambda: {i: i for i in range(9)}, lambda h, n: h.pop(len(h) - 1), len),
    "at the beginning": (lambda: [1, 2], lambda h, n: h.insert(0, n), lambda h: h[0] + 2 * h[-1]),
    "one less": (lambda: [*range(9)], lambda h, n: h.pop(), lambda h: h[-1]),
    "the first one less": (lambda: [*range(9)], lambda h, n: h.pop(0), lambda h: h[0]),
    "turned": (lambda: collections.deque([1, 2, 3]), lambda h, n: h.rotate(1), lambda h: h[0]),
    "reversed": (lambda: [1, 2, 3], lambda h, n: h.reverse(), lambda h: h[0]),
    "exchanged": (lambda: [1, 2], lambda h, n: _set(h, slice(None), [h[1], h[0]]), lambda h: h[0]),
    "within others": (lambda: {"a": {"b": [0, 0]}}, lambda h, n: _set(h["a"]["b"], 1, n), lambda h: h["a"]["b"][1]),
    "a tuple": (lambda: [(0, 1)], lambda h, n: _set(h, 0, (h[0][0] + n, 1)), lambda h: h[0][0]),
    "a list that is made": (
        lambda: collections.defaultdict(list),
        lambda h, n: h["a"].append(n),
        lambda h: len(h["a"]),
    ),
    "a truth value": (lambda: {"a": False}, lambda h, n: _set(h, "a", not h["a"]), lambda h: 1.0 if h["a"] else 0.0),
    "a truth value within": (
        lambda: {"a": {"b": False}},
        lambda h, n: _set(h["a"], "b", not h["a"]["b"]),
        lambda h: 1.0 if h["a"]["b"] else 0.0,
    ),
    "a text": (lambda: {"a": ""}, lambda h, n: _set(h, "a", h["a"] + "b"), lambda h: len(h["a"])),
    "nothing at first": (lambda: {"a": None}, lambda h, n: _set(h, "a", (h["a"] or 0) + n), lambda h: h["a"]),
    "a number": (lambda: {"a": 0}, lambda h, n: _set(h, "a", h["a"] + n), lambda h: h["a"]),
    "a queue": (queue.Queue, lambda h, n: h.put(n), lambda h: h.qsize()),
}


class Keeping(torch.nn.Module):
    def __init__(self, case: Case, of_size: bool, reads: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        make, self.change, self.read = case
        self.held, self.of_size, self.reads = make(), of_size, reads

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.held, x.shape[0] if self.of_size else 1)
        y = self.linear(x)
        return y * self.read(self.held) if self.reads else y


@pytest.mark.parametrize("reads", [True, False], ids=["read", "kept"])
@pytest.mark.parametrize("of_size", [True, False], ids=["a size", "a number"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_what_eager_keeps(name: str, of_size: bool, reads: bool) -> None:
    ours, eager = (Keeping(CASES[name], of_size, reads) for _ in range(2))
    eager.load_state_dict(ours.state_dict())
    wrapped = ORTModule(ours, options=Options(summary=False))
    for step in range(5):
        x = torch.randn(2 + step % 3, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
        assert name == "a queue" or ours.held == eager.held
        assert eager.read(eager.held) == ours.read(ours.held)


@pytest.mark.parametrize("of_size", [True, False])
def test_a_log_that_is_not_read_costs_no_graph(of_size: bool) -> None:
    ours = Keeping((list, lambda h, n: h.append({"rows": n}), len), of_size, reads=False)
    wrapped = ORTModule(ours, options=Options(summary=False))
    for step in range(12):
        wrapped(torch.randn(2 + step % 3, 4)).sum().backward()
    assert captures(wrapped) <= 3 and len(ours.held) == 12
    assert ours.held[-1] == {"rows": 4 if of_size else 1}


def test_a_number_among_others_is_looked_at_where_they_are_compared() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.steps = torch.nn.Linear(4, 4), {"n": 0, "every": 3}

        def forward(self, x: Tensor) -> Tensor:
            self.steps["n"] += 1
            y = self.linear(x)
            return y * 2 if self.steps["n"] % self.steps["every"] == 0 else y

    ours, eager = Scaled(), Scaled()
    eager.load_state_dict(ours.state_dict())
    wrapped = ORTModule(ours, options=Options(summary=False))
    for step in range(12):
        for model in (ours, eager):
            if step == 6:
                model.steps["every"] = 2
            if step == 9:
                model.steps = {"n": 5, "every": 2}
        x = torch.randn(2 + step % 3, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
        assert ours.steps == eager.steps and type(ours.steps["n"]) is int
    assert captures(wrapped) <= 6


def test_a_cache_of_the_latest_is_in_its_order() -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.kept: collections.OrderedDict[int, int] = collections.OrderedDict()

        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[0]
            if rows in self.kept:
                self.kept.move_to_end(rows)
            else:
                self.kept[rows] = 2 * rows
                if len(self.kept) > 2:
                    self.kept.popitem(last=False)
            return self.linear(x) * self.kept[rows]

    ours, eager = Cached(), Cached()
    eager.load_state_dict(ours.state_dict())
    wrapped = ORTModule(ours, options=Options(summary=False))
    for rows in (2, 3, 2, 4, 2, 3, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
        assert [*ours.kept.items()] == [*eager.kept.items()]


@pytest.mark.parametrize("most", [None, 3])
def test_tensors_in_a_queue(most: int | None) -> None:
    class Remembering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.latest: collections.deque[Tensor] = collections.deque(maxlen=most)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.latest.append(y.detach().mean(0))
            return y + self.latest[-1]

    ours, eager = Remembering(), Remembering()
    eager.load_state_dict(ours.state_dict())
    wrapped = ORTModule(ours, options=Options(summary=False))
    for rows in (2, 3, 2, 4, 2):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
        torch.testing.assert_close([*ours.latest], [*eager.latest])
    assert captures(wrapped) == 2 and ours.latest.maxlen == most
