"""Numbers that the program sets on a module between calls: a weight that is annealed, a temperature, an epoch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Calls, captures, pair, same_step

from onnxtrain import ORTModule


@dataclasses.dataclass
class Settings:
    """Of a user's own class."""

    temperature: float = 1.0


class Model(torch.nn.Module):
    """Computes with numbers that it holds."""

    def __init__(self, how: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.how = torch.nn.Linear(4, 4), how
        self.beta, self.epoch, self.settings = 0.0, 0, Settings()
        self.weights = [1.0, 0.5, 0.25, 2.0, 3.0, 0.1, 4.0, 0.7, 0.2, 5.0, 6.0, 7.0]
        self.steps, self.loss = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, self.layer(x))


def _sets(module: Model, step: int) -> None:
    module.beta, module.epoch, module.settings.temperature = step / 20, step, 1 + step / 7
    module.steps += 1


def _compare(how: Callable[[Model, torch.Tensor], torch.Tensor], sets: Any = _sets) -> ORTModule:
    module = Model(how)
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for step in range(12):
        x = torch.randn(3 + step % 2, 4)
        for called, held in ((wrapped, module), (eager, eager)):
            sets(held, step)
            held.zero_grad()
            held.loss = called(x).square().mean()
            held.loss.backward()
        torch.testing.assert_close(module.loss, eager.loss)
        torch.testing.assert_close(module.layer.weight.grad, eager.layer.weight.grad)
    return wrapped


FREE = {
    "beta": (lambda m, h: h + m.beta * h.exp(), 2),
    "temperature": (lambda m, h: (h / m.settings.temperature).softmax(-1), 2),
    "both": (lambda m, h: h * m.beta + m.epoch * h.mean() + m.settings.temperature, 2),
    "squared": (lambda m, h: h * m.epoch**2, 2),
    "clamped": (lambda m, h: h * min(1.0, m.epoch / 5), 3),
    "branch": (lambda m, h: h * 2 if m.epoch > 5 else h * m.beta, 3),
    "tensor": (lambda m, h: h * torch.tensor(m.beta), 2),
    "filled": (lambda m, h: h + torch.full_like(h, m.beta), 2),
}


@pytest.mark.parametrize("name", FREE)
def test_a_number_that_is_set_anew_is_an_input(name: str) -> None:
    """From its second value on one graph serves all, or one for each answer to what is asked of it."""
    how, graphs = FREE[name]
    wrapped = _compare(how)
    assert captures(wrapped) == graphs, wrapped.explain()


def test_a_size_of_which_nothing_else_is_left() -> None:
    """The gradient reads the number, which what nobody reads had as its size."""

    def part(x: torch.Tensor, count: int) -> torch.Tensor:
        torch.arange(count).double()
        return x[:, : count // 2]

    wrapped, eager = pair(Calls(part))
    for size in (4, 8, 6, 3):
        same_step(wrapped, eager, torch.randn(3, size, size, requires_grad=True), size // 2)


STEERS = {
    "index": lambda m, h: h * m.weights[m.epoch],
    "size": lambda m, h: h[:, : 1 + m.epoch % 4],
    "text": lambda m, h: h * len("x" * (m.epoch + 1)),
    "range": lambda m, h: sum((h * i for i in range(m.epoch + 1)), torch.zeros(())),
    "dropout": lambda m, h: F.dropout(h, m.beta, training=False),
}


@pytest.mark.parametrize("name", STEERS)
def test_a_number_whose_values_need_a_graph_each(name: str) -> None:
    """It is no input; after eight graphs a value has one as soon as two calls in a row have it, as before."""
    wrapped = _compare(STEERS[name])
    assert "paths" not in wrapped.explain().splitlines()[0]


def test_one_value_for_some_calls_each() -> None:
    """An epoch that picks from a list has a graph each, also beyond the eighth."""

    def sets(module: Model, step: int) -> None:
        module.epoch = step // 2

    module = Model(STEERS["index"])
    wrapped = ORTModule(module)
    for step in range(24):
        sets(module, step)
        x = torch.randn(3, 4)
        torch.testing.assert_close(wrapped(x), module.layer(x) * module.weights[module.epoch])
    assert captures(wrapped) >= 12


def test_modes_and_other_reasons_keep_their_graphs() -> None:
    """Evaluation in between reads the number that holds then."""
    module = Model(FREE["beta"][0])
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for step in range(6):
        x = torch.randn(2, 4)
        for held in (module, eager):
            _sets(held, step)
        for is_training in (True, False):
            wrapped.train(is_training)
            torch.testing.assert_close(wrapped(x), eager(x))
    assert captures(wrapped) <= 4


SIGNED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "expand": lambda x, n: x.unsqueeze(0).expand(n, -1),
    "expand, behind": lambda x, n: x.unsqueeze(1).expand(-1, n),
    "expand, of a list": lambda x, n: x.expand([n, 6]) if n != -1 else x.expand((1, n)),
    "view": lambda x, n: x.view(n, -1) if n != -1 else x.view(n, 1),
    "reshape": lambda x, n: x.reshape(-1, n) if n != -1 else x.reshape(1, n),
    "slice from": lambda x, n: x[n:],
    "slice to": lambda x, n: x[:n],
    "index": lambda x, n: x[n],
    "narrow": lambda x, n: x.narrow(0, n, 1),
    "roll": lambda x, n: x.roll(n),
    "pad": lambda x, n: F.pad(x, (n, 2)),
    "sum": lambda x, n: x.expand(4, 3, 2, 6).sum(n),
    "unsqueeze": lambda x, n: x.expand(2, 3, 6).unsqueeze(n),
    "unflatten": lambda x, n: x.unflatten(0, (n, -1)) if n != -1 else x.unflatten(0, (n, 2)),
    "triangle": lambda x, n: x.expand(6, 6).tril(n),
    "diagonal": lambda x, n: x.expand(6, 6).diagonal(n),
    "transpose": lambda x, n: x.expand(2, 3, 4, 6).transpose(0, n),
    "select": lambda x, n: x.select(0, n),
}


@pytest.mark.parametrize("first", [3, -1])
@pytest.mark.parametrize("name", SIGNED)
def test_a_number_given_may_be_below_zero(name: str, first: int) -> None:
    """There it counts from the end, or stands for what is left."""
    wrapped, eager = pair(Calls(SIGNED[name]).double())
    for number in (first, 1, 3, -1, 2, -1, 3):
        same_step(wrapped, eager, torch.randn(6, dtype=torch.float64, requires_grad=True), number)
