"""Tensors that code keeps elsewhere than on the module: its own are its parameters, those of others are borrowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import captures

from onnxtrain import Options, ORTModule

Tensor = torch.Tensor
SHARED = torch.linspace(0, 1, 3)


class InDict(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.ones(3))
        self.by_name = {"weight": self.weight, "shift": self.shift}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by_name["weight"] + self.by_name["shift"]


class Within(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InDict()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(x), self.inner.weight * x]).sum(0)


class InList(torch.nn.Module):
    """The list holds a layer that is registered by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.layers = [(self.layer, self.layer.weight)]

    def forward(self, x: Tensor) -> Tensor:
        (layer, weight) = self.layers[0]
        return layer(x) @ weight


class PartOfMemory(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3))
        self.register_buffer("scale", torch.rand(6))
        self.parts = [self.weight.detach()[1:3].T, self.scale[::2]]

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T)[:, :2] @ self.parts[0].T * self.parts[1]


class InBranch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = self.weights
        return torch.cond(x.sum() > 0, lambda v: v * weight * SHARED, lambda v: v - weight, (x,))


def in_closure() -> torch.nn.Module:
    weight = torch.nn.Parameter(torch.randn(3))

    class Closure(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * weight

    return Closure()


@pytest.mark.parametrize("make", [InDict, Within, InList, PartOfMemory, InBranch, in_closure])
def test_what_is_kept_elsewhere_is_trained(make: Callable[[], torch.nn.Module]) -> None:
    module = make()
    wrapped = ORTModule(module, options=Options(summary=False))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for n in (2, 3, 5):
        x = torch.randn(n, 3)
        found = []
        for model in (module, wrapped):
            optimizer.zero_grad()
            y = model(x)
            y.square().mean().backward()
            found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
        torch.testing.assert_close(found[1], found[0])
        optimizer.step()
        for buffer in module.buffers():
            buffer.mul_(1.5)
    assert captures(wrapped) == 1


class Teacher(torch.nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layer, self.others, self.frozen = torch.nn.Linear(3, 3), [torch.nn.Linear(3, 3)], frozen

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen):
            target = self.others[0](x)
        return (self.layer(x) - target).square().mean()


def test_layers_that_are_none_of_the_modules_are_trained() -> None:
    module = Teacher(frozen=False)
    wrapped, expected = ORTModule(module, options=Options(summary=False)), copy.deepcopy(module)
    ours = [*module.parameters(), *module.others[0].parameters()]
    theirs = [*expected.parameters(), *expected.others[0].parameters()]
    optimizers = [torch.optim.SGD(found, 0.1) for found in (ours, theirs)]
    for n in (2, 3, 5):
        x = torch.randn(n, 3)
        for model, optimizer in zip((wrapped, expected), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])
    torch.testing.assert_close(ours, theirs)
    assert captures(wrapped) == 1


@pytest.mark.parametrize("through", ["a function", "data"])
def test_a_teacher_follows_its_pupil(through: str) -> None:
    module = Teacher(frozen=True)
    wrapped = ORTModule(module, options=Options(summary=False))
    x = torch.randn(4, 3)
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), module(x))
        wrapped(x).backward()
        for theirs, own in zip(module.others[0].parameters(), module.layer.parameters(), strict=True):
            (theirs.data if through == "data" else theirs.detach()).lerp_(own.detach(), 0.5)
        assert module.others[0].weight.grad is None
    assert captures(wrapped) == 1


class Layer(torch.nn.Module):
    """Reads a tensor that all have, and one of its own that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unregistered = torch.nn.Linear(3, 3), [torch.ones(3, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * SHARED.T * self.unregistered[0]).tanh()


def test_layers_that_borrow_other_tensors_are_others() -> None:
    module = torch.nn.Sequential(*(Layer() for _ in range(3)))
    wrapped, expected = ORTModule(module, options=Options(summary=False)), copy.deepcopy(module)
    for n in (2, 3):
        x = torch.randn(n, 3)
        found = [model(x) for model in (wrapped, expected)]
        for y in found:
            y.square().sum().backward()
        torch.testing.assert_close(*found)
        torch.testing.assert_close(
            *[[layer.unregistered[0].grad for layer in model] for model in (module, expected)],
        )
        for model in (module, expected):
            for i, layer in enumerate(model):
                layer.unregistered[0].data.add_(i)
        SHARED.mul_(2)
    assert captures(wrapped) == 1


def test_borrowed_tensors_are_verified() -> None:
    module = torch.nn.Sequential(Layer(), Teacher(frozen=False))
    wrapped = ORTModule(module, options=Options(summary=False, verify=True))
    for n in (2, 3):
        wrapped(torch.randn(n, 3)).backward()


def test_the_graph_cache_knows_no_tensors_of_others(tmp_path: Path) -> None:
    for factor in (1.0, 2.0):  # as in another process
        torch.manual_seed(0)
        module = Layer()
        module.unregistered[0].data.mul_(factor)
        wrapped = ORTModule(module, options=Options(summary=False, cache_dir=tmp_path))
        x = torch.randn(2, 3)
        torch.testing.assert_close(wrapped(x), module(x))
        wrapped(x).sum().backward()
        assert module.unregistered[0].grad is not None


class Unread(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SHARED.detach()
        return x * 2


def test_a_tensor_that_is_only_detached() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(ORTModule(Unread())(x), 2 * x)
