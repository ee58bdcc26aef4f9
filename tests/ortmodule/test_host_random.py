"""What a forward pass draws from Python's and numpy's generators is drawn anew at every call, in eager PyTorch."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from parity import captures

from onnxtrain import Options, ORTModule

Tensor = torch.Tensor


class Draws(torch.nn.Module):
    def __init__(self, draw: Callable[[Draws, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.draw = torch.nn.Linear(3, 3), draw
        self.own, self.drawn = random.Random(3), numpy.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * self.draw(self, x) if self.training else y


DRAWS: dict[str, Callable[[Draws, Tensor], Any]] = {
    "random": lambda _, x: random.random(),
    "a path": lambda _, x: 2.0 if random.uniform(0, 1) < 0.5 else 3.0,
    "numpy": lambda _, x: numpy.random.rand(),
    "numpy's array": lambda _, x: torch.from_numpy(numpy.random.rand(3)).float(),
    "a generator of the module": lambda module, x: module.own.random(),
    "numpy's generator of the module": lambda module, x: module.drawn.random(),
    "beside a look": lambda _, x: random.random() * (2.0 if (x > 0).any() else 1.0),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_are_drawn_as_in_eager_pytorch(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    module = Draws(DRAWS[kind])
    wrapped, expected = ORTModule(module, options=Options(summary=False)), copy.deepcopy(module)
    found = []
    with caplog.at_level(logging.WARNING):
        for model in (wrapped, expected):
            random.seed(1)
            numpy.random.seed(1)
            steps = []
            for step in range(4):
                model.train(step != 2)
                y = model(torch.ones(2, 3))
                y.sum().backward()
                steps.append(y.detach())
            found.append([*steps, module.layer.weight.grad if model is wrapped else expected.layer.weight.grad])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], found[0][1]) or kind == "a path"
    assert captures(wrapped) == 1  # for the call that draws nothing
    line = DRAWS[kind].__code__.co_firstlineno
    assert caplog.text.count("Draws runs in eager PyTorch") == 1
    assert f"{__file__}:{line}" in caplog.text and f"{__file__}:{line}" in wrapped.explain()


def test_who_only_reads_a_generator_has_a_graph() -> None:
    module = Draws(lambda module, x: float(len(module.own.getstate())))
    wrapped = ORTModule(module, options=Options(summary=False))
    x = torch.ones(2, 3)
    assert torch.equal(wrapped(x), module(x)) and captures(wrapped) == 1 and "eager" not in wrapped.explain()
