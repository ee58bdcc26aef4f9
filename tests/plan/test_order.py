"""No order of a step's operators needs much less memory than the one in which they run: by trying all of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.order import Step, plan_of, step_of

_STATES = 200_000  # sets of operators that a search may look at


class Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT / 4, -1) @ v)
        return (x + self.down(nn.functional.gelu(self.up(x)))).square().mean()


class Scaled(nn.Module):
    """Normalizations as Llama and T5 write them, whose mean reads a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x.logsumexp(-1).sum()


class Images(nn.Module):
    """Convolutions with a way around them, and one that is joined later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(16, 8, 1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = torch.nn.functional.max_pool2d(x, 2)
        y = nn.functional.interpolate(torch.relu(self.second(y)), scale_factor=2)
        return self.head(self.third(torch.cat([x, y], 1)).mean((2, 3))).logsumexp(-1).sum()


class Branches(nn.Module):
    """Ways that do not depend on each other, of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 128), nn.Linear(16, 8)
        self.back, self.small = nn.Linear(128, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.back(torch.tanh(self.wide(x)))) * self.small(torch.tanh(self.narrow(x)))).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (Attention, lambda: torch.randn(8, 32, 16)),
    "scaled": (Scaled, lambda: torch.randn(64, 32)),
    "images": (Images, lambda: torch.randn(4, 3, 16, 16)),
    "branches": (Branches, lambda: torch.randn(64, 16)),
}


def step(name: str) -> tuple[Step, int]:
    """The operators of a step of a model, and what the step needs."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    plan = plan_of(build(), {"x": batch()})
    return step_of(plan), plan.footprint.peak


def least_of_all(step: Step) -> int:
    """The least peak of all orders: sets of operators that have run are looked at, those first that needed least.

    What makes no more than it frees, and needs no more than was needed before, runs at once: nothing is lost by that.
    """
    tickets = itertools.count()
    heap = [(0, next(tickets), frozenset[int]())]
    seen = set[frozenset[int]]()
    while heap:
        most, _, done = heapq.heappop(heap)
        done = _with_free(step, done, most)
        if len(done) == step.count:
            return most
        if done in seen:
            continue
        seen.add(done)
        assert len(seen) < _STATES, "too many orders to try"
        for index in _ready(step, done):
            heapq.heappush(heap, (max(most, step.needed(index, {*done})), next(tickets), done | {index}))
    raise AssertionError("there is no order")


def _ready(step: Step, done: frozenset[int]) -> Iterable[int]:
    return [i for i in range(step.count) if i not in done and step.before[i] <= done]


def _with_free(step: Step, done: frozenset[int], most: int) -> frozenset[int]:
    while True:
        now = step.live({*done})
        free = (i for i in _ready(step, done) if step.needed(i, {*done}) <= most and step.live({*done, i}) <= now)
        if (index := next(free, None)) is None:
            return done
        done |= {index}


@pytest.mark.parametrize("name", MODELS)
def test_the_order_is_near_the_best_of_all(name: str) -> None:
    found, peak = step(name)
    assert found.peak(found.order()) == pytest.approx(peak, rel=0.01), "the measure is what the step allocates"
    least = least_of_all(found)
    assert found.least() <= least, "no order is below the bound"
    assert found.least() >= 0.85 * least, "the bound says something"
    assert peak <= 1.05 * least


@pytest.mark.parametrize("name", ["attention", "scaled", "branches"])
def test_another_order_needs_more(name: str) -> None:
    found, peak = step(name)
    done: list[int] = []
    while len(done) < found.count:
        done.append(max(_ready(found, frozenset(done)), key=lambda i: (found.live({*done, i}), i)))
    assert found.peak(done) > 1.05 * peak


def test_a_size_is_taken_where_its_value_is_made() -> None:
    build, batch = MODELS["scaled"]
    plan = plan_of(build(), {"x": batch()}).fit.compiled.plan
    nodes = list(plan.forward.graph)
    sizes = [i for i, n in enumerate(nodes) if n.op_type == "Size"]
    assert sizes
    for index in sizes:
        made = nodes.index(nodes[index].inputs[0].producer())
        assert {n.op_type for n in nodes[made + 1 : index]} <= {"Size", "Shape"}
