"""A forward that is assigned: around the graph, or in the place of the module's own."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import captures, pair, same_step

from onnxtrain import ORTModule


class Net(torch.nn.Module):
    """A body and a head, as a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) * gain

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).sigmoid())


def x() -> torch.Tensor:
    return torch.randn(5, 4)


def chunked(model: torch.nn.Module) -> None:
    """As TRL's trainers put a loss of their own around the head."""
    former = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused: bool = False, **kwargs: Any) -> Any:
        if not fused:
            return former(*args, **kwargs)
        hidden = self.body(*args, **kwargs).relu()
        return torch.nn.functional.linear(hidden, self.head.weight).logsumexp(-1)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


def test_a_method_in_its_place_is_captured() -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    before = wrapped.forward
    for module in (wrapped, eager):
        chunked(module)
    for fused in (True, False, True):
        same_step(wrapped, eager, x(), fused=fused)
    assert captures(wrapped) == 3 and wrapped.forward is not before
    assert "ReduceLogSumExp" in wrapped.graph("captured") or "LogSumExp" in wrapped.graph("captured")
    torch.testing.assert_close(wrapped.module(x(), fused=True).shape, torch.Size([5]))


def test_its_signature_is_that_of_the_class() -> None:
    wrapped = ORTModule(Net())
    assert inspect.signature(type(wrapped).forward) == inspect.signature(Net.forward)
    chunked(wrapped)
    assert list(inspect.signature(wrapped.forward).parameters) == ["x", "gain"]


ASSIGNED: dict[str, Callable[[Any], Any]] = {
    "method": lambda module: types.MethodType(lambda self, x: self.head(self.body(x).relu()), module),
    "own method": lambda module: module.other,
    "function": lambda module: lambda x: module.head(module.body(x).relu()),
    "partial": lambda module: functools.partial(Net.other, module),
    "of the wrapped module": lambda module: types.MethodType(Net.other, getattr(module, "module", module)),
}


@pytest.mark.parametrize("make", ASSIGNED.values(), ids=ASSIGNED)
@pytest.mark.parametrize("called", [True, False])
def test_what_replaces_is_captured_and_taken_back(make: Callable[[Any], Any], called: bool) -> None:
    wrapped, eager = pair(Net())
    if called:
        same_step(wrapped, eager, x())
    for module in (wrapped, eager):
        module.forward = make(module)
    for _ in range(2):
        same_step(wrapped, eager, x())
    assert captures(wrapped) == 1 + called
    for module in (wrapped, eager):
        del module.forward
    assert "forward" not in vars(wrapped.module)
    same_step(wrapped, eager, x())
    assert "Tanh" in wrapped.graph("captured")
    with pytest.raises(AttributeError):
        del wrapped.forward


def test_the_second_replaces_the_first_and_an_earlier_one_comes_back() -> None:
    wrapped, eager = pair(Net())
    former = wrapped.forward, eager.forward
    for make in (ASSIGNED["method"], ASSIGNED["own method"]):
        for module in (wrapped, eager):
            module.forward = make(module)
        same_step(wrapped, eager, x())
    wrapped.forward, eager.forward = former
    same_step(wrapped, eager, x())
    assert "forward" not in vars(wrapped.module) and "Tanh" in wrapped.graph("captured")


def test_a_layer_in_its_place() -> None:
    """A graph of a module whose attributes nobody looks at is captured anew too."""
    wrapped, eager = pair(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    same_step(wrapped, eager, x())
    for module in (wrapped, eager):
        module.forward = types.MethodType(lambda self, x: self[0](x).tanh(), module)
    same_step(wrapped, eager, x())


class Exponential:
    """A callable object around a forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).exp()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def _declared(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def around(*args: Any) -> Any:
        return forward(*args).exp()

    return around


AROUND: dict[str, Callable[[Any], Any]] = {
    "closure": lambda module: (lambda forward: lambda x: forward(x).exp())(module.forward),
    "wraps": lambda module: _declared(module.forward),
    "wraps twice": lambda module: torch.no_grad()(_declared(module.forward)),
    "default": lambda module: lambda x, forward=module.forward: forward(x).exp(),
    "partial": lambda module: functools.partial(lambda forward, x: forward(x).exp(), module.forward),
    "object": lambda module: Exponential(module.forward),
    "method of an object": lambda module: Exponential(module.forward).run,
}


@pytest.mark.parametrize("make", AROUND.values(), ids=AROUND)
def test_what_is_around_stays_outside(make: Callable[[Any], Any]) -> None:
    wrapped, eager = pair(Net())
    assigned = make(wrapped)
    wrapped.forward = assigned
    wrapped.note = 1
    given = x()
    torch.testing.assert_close(wrapped(given), eager(given).exp())
    assert wrapped.forward is assigned and "forward" not in vars(wrapped.module)
    assert captures(wrapped) == 1 and "Exp" not in wrapped.graph("captured")
    del wrapped.forward
    same_step(wrapped, eager, given)


def test_around_what_replaces() -> None:
    """As accelerate prepares a model that TRL gave a forward."""
    wrapped, eager = pair(Net())
    for module in (wrapped, eager):
        chunked(module)
        module.forward = _declared(module.forward)
    same_step(wrapped, eager, x(), loss=lambda y: y.sum())
    assert captures(wrapped) == 1


def test_a_copy_has_the_assigned_forward() -> None:
    wrapped, eager = pair(Net())
    for module in (wrapped, eager):
        module.forward = types.MethodType(Net.other, module)
    same_step(copy.deepcopy(wrapped), copy.deepcopy(eager), x())


def test_it_is_exported_as_part_of_a_larger_module() -> None:
    wrapped = ORTModule(Net())
    for _ in range(2):
        program = torch.export.export(wrapped, (x(),))
        torch.testing.assert_close(program.module()(given := x()), wrapped.module(given))
        chunked(wrapped)
