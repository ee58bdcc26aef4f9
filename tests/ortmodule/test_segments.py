"""A backward pass in parts: gradients, and hooks on them, do not wait for the rest of it, and nothing else changes."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity import pair
from torch import nn

from onnxtrain import Options, ORTModule
from onnxtrain.engine.state import State
from onnxtrain.errors import GradientError, OptionError
from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.optim import step_in_backward

Tensor = torch.Tensor


class Noted(torch.autograd.Function):
    """The identity; says when its backward runs."""

    log: list[str]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Noted.log.append("computed")
        return dy.clone()


class Noting(nn.Module):
    """Says when its backward runs."""

    def forward(self, x: Tensor) -> Tensor:
        return Noted.apply(x)


class Tied(nn.Module):
    """An embedding whose weight is the head's too, layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(x @ self.embedding.weight.T, ids)


def layers(count: int = 5, width: int = 8) -> nn.Module:
    return nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.Tanh()) for _ in range(count)))).double()


def convolutions() -> nn.Module:
    blocks = ((nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*itertools.chain(*blocks)).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layers": (layers, lambda: torch.randn(3, 8, dtype=torch.double)),
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 5, 5, dtype=torch.double)),
    "tied": (lambda: Tied().double(), lambda: torch.randint(0, 7, (6,))),
    "recurrent": (lambda: Recurrent().double(), lambda: torch.randn(2, 4, 8, dtype=torch.double)),
}


class Recurrent(nn.Module):
    """Two recurrent layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


def same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


def step_with(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def four_steps(wrapped: nn.Module, eager: nn.Module, batch: Callable[[], Tensor]) -> Iterator[int]:
    """Forward and backward of both, with the same loss; stops after each step."""
    for step in range(4):
        x = batch()
        losses = [m(x).square().sum() for m in (wrapped, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        yield step


def test_hooks_run_before_the_rest_is_computed() -> None:
    Noted.log = log = []
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), Noting(), layers(4, 4).float()), options=Options(segments=3))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    model(torch.randn(3, 4)).sum().backward()
    before = log[: log.index("computed")]
    assert {"2.6.weight", "2.6.bias"} <= {*before}
    assert {*log[log.index("computed") + 1 :]} >= {"0.weight", "0.bias"}
    order = [int(name.split(".")[1]) for name in before]
    assert order == sorted(order, reverse=True), "gradients arrive in the order of the backward pass"


@pytest.mark.parametrize("segments", [1, 2, 100])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_eager(name: str, segments: int) -> None:
    build, batch = MODELS[name]
    wrapped, eager = pair(build(), segments=segments)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (wrapped, eager)]
    for _ in four_steps(wrapped, eager, batch):
        same_gradients(wrapped, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("segments", [1, 3, 100])
@pytest.mark.parametrize("name", MODELS)
def test_an_optimizer_that_steps_within_the_backward_pass(name: str, segments: int) -> None:
    build, batch = MODELS[name]
    wrapped, eager = pair(build(), segments=segments)
    for model in (wrapped, eager):
        for parameter in model.parameters():
            stepping = torch.optim.SGD([parameter], 0.05, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(functools.partial(step_with, stepping))
    for _ in four_steps(wrapped, eager, batch):
        pass
    for a, b in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert a.grad is None


def test_a_parameter_that_changes_before_it_is_read_is_an_error() -> None:
    def spoil(parameter: Tensor, _: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(1)

    wrapped, eager = pair(layers(), segments=100)
    x = torch.randn(3, 8, dtype=torch.double)
    for model, error in ((wrapped, GradientError), (eager, RuntimeError)):
        third, last = list(model.parameters())[-6], list(model.parameters())[-1]
        last.register_post_accumulate_grad_hook(functools.partial(spoil, third))
        with pytest.raises(error, match="modified"):
            model(x).sum().backward()


def test_what_a_part_saved_is_freed_when_it_has_run() -> None:
    def note(_: Tensor) -> None:
        tensors = (t for t in gc.get_objects() if type(t) is Tensor and not t.is_nested)
        large = [t for t in tensors if t.shape[:1] == (4099,)]
        found.append(sum({t.data_ptr(): t.nbytes for t in large}.values()))

    wrapped = ORTModule(layers(6), options=Options(segments=100))
    found: list[int] = []
    for layer in wrapped.module:
        if isinstance(layer, nn.Linear):
            layer.bias.register_post_accumulate_grad_hook(note)
    for _ in range(2):
        found.clear()
        x = torch.randn(4099, 8, dtype=torch.double)
        wrapped(x).sum().backward()
    assert len(found) == 6 and found == sorted(found, reverse=True) and found[0] - found[-1] >= 3 * x.nbytes


def test_the_memory_of_a_gradient_is_handed_over() -> None:
    wrapped = ORTModule(layers(), options=Options(segments=3))
    places: dict[int, int] = {}
    for parameter in wrapped.parameters():
        parameter.register_hook(lambda g, p=parameter: places.__setitem__(id(p), g.data_ptr()))
    wrapped(torch.randn(3, 8, dtype=torch.double)).sum().backward()
    assert [places[id(p)] for p in wrapped.parameters()] == [p.grad.data_ptr() for p in wrapped.parameters()]


def retained(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def some_first(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().sum()
    last = list(model.parameters())[-1]
    (dx,) = torch.autograd.grad(loss, last, retain_graph=True)
    (loss + dx.sum()).backward()


def last_alone(model: nn.Module, x: Tensor) -> None:
    last = list(model.parameters())[-2:]
    for parameter, gradient in zip(last, torch.autograd.grad(model(x).square().sum(), last), strict=True):
        parameter.grad = gradient


def penalty(model: nn.Module, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def of_some(model: nn.Module, x: Tensor) -> None:
    wanted = list(model.parameters())[:3]
    slopes = torch.autograd.grad(model(x).square().sum(), wanted, create_graph=True)
    sum(s.square().sum() for s in slopes).backward()


def twice(model: nn.Module, x: Tensor) -> None:
    (model(x).square().sum() * model(x * 2).sum()).backward()


def frozen(model: nn.Module, x: Tensor) -> None:
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    model(x.detach()).square().sum().backward()


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("segments", [1, 3, 100])
@pytest.mark.parametrize("use", [retained, some_first, last_alone, penalty, of_some, twice, frozen])
def test_autograd_as_people_use_it(use: Callable[[nn.Module, Tensor], None], segments: int, backend: str) -> None:
    wrapped, eager = pair(layers(), segments=segments, backend=backend)
    for _ in range(2):
        x = torch.randn(3, 8, dtype=torch.double, requires_grad=True)
        use(wrapped, x)
        ours, x.grad = x.grad, None
        use(eager, x)
        torch.testing.assert_close(ours, x.grad)
        same_gradients(wrapped, eager)


class Heads(nn.Module):
    """Two outputs, of which a loss may be made of one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = layers(), nn.Linear(8, 2).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.trunk(x)
        return found.square().mean(), self.a(found), self.b(found)


def test_another_variant_has_other_parts() -> None:
    """What receives a gradient is known when the backward pass begins: its nodes are then there already."""
    wrapped, eager = pair(Heads(), segments=100)
    for chosen in ((0,), (1,), (0, 2), (1, 2), (0,), (2,)):
        x = torch.randn(3, 8, dtype=torch.double)
        for model in (wrapped, eager):
            model.zero_grad()
            outputs = model(x)
            torch.autograd.backward([outputs[i].sum() for i in chosen])
        same_gradients(wrapped, eager)


@pytest.mark.parametrize("segments", [1, 100])
def test_another_variant_is_kept(segments: int) -> None:
    wrapped, eager = pair(Heads(), segments=segments)
    x = torch.randn(3, 8, dtype=torch.double)
    for model in (wrapped, eager):
        _, a, b = model(x)
        for _ in range(3):
            (a.sum() + b.square().sum()).backward(retain_graph=True)
    same_gradients(wrapped, eager)


class Shown(nn.Module):
    """Gives a parameter away, as it is and as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.layers[4].weight
        return self.layers(x), weight, weight.T


@pytest.mark.parametrize("segments", [1, 3, 100])
def test_a_parameter_among_the_outputs(segments: int) -> None:
    wrapped, eager = pair(Shown(), segments=segments)
    x = torch.randn(3, 8, dtype=torch.double)
    for _ in range(2):
        for model in (wrapped, eager):
            model.zero_grad()
            y, weight, turned = model(x)
            (y.square().sum() + (weight * 3).sum() + turned.square().sum()).backward()
        same_gradients(wrapped, eager)
        assert all(p.is_leaf for p in wrapped.parameters())


def test_verified_steps() -> None:
    wrapped = ORTModule(layers(), options=Options(segments=100, verify=True))
    for _ in range(2):
        wrapped(torch.randn(3, 8, dtype=torch.double)).sum().backward()
    assert wrapped.explain()


def test_small_steps_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    take = State.take
    monkeypatch.setattr(State, "take", lambda self, index: (seen.append(len(self.parts)), take(self, index))[1])
    small, large = ORTModule(layers()), ORTModule(layers(6, 512))
    small(torch.randn(3, 8, dtype=torch.double)).sum().backward()
    assert seen == [1]
    seen.clear()
    large(torch.randn(2048, 512, dtype=torch.double)).sum().backward()
    assert len(seen) == 3, "of 4 G of operations each"
    assert "the backward pass in 3 parts" in large.explain() and "parts" not in small.explain()


def parts_of(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many parts a backward pass has."""
    seen: list[int] = []
    take = State.take
    with monkeypatch.context() as patch:
        patch.setattr(State, "take", lambda self, index: (seen.append(len(self.parts)), take(self, index))[1])
        model(x).sum().backward()
    return seen[0]


def test_hooks_that_take_gradients_have_them_early(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8, dtype=torch.double)
    model = ORTModule(layers())
    assert parts_of(model, x, monkeypatch) == 1
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    many = parts_of(model, x, monkeypatch)
    assert many >= 4 and f"in {many} parts" in model.explain()
    handle.remove()
    assert parts_of(model, x, monkeypatch) == 1
    stated = ORTModule(layers(), options=Options(segments=2))
    stated[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    assert parts_of(stated, x, monkeypatch) == 2
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1")
    assert parts_of(ORTModule(layers()), x, monkeypatch) == many


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_the_variable_has_gradients_handed_over_layer_by_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1")
    Noted.log = log = []
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Noting()) for _ in range(4)]
    model = ORTModule(nn.Sequential(*blocks))
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            getattr(parameter, kind)(lambda _, name=name: log.append(name[0]))
    model(torch.randn(3, 4)).sum().backward()
    places = [i for i, what in enumerate(log) if what == "computed"]
    assert len(places) == 4
    for block, (begin, end) in zip("321", itertools.pairwise(places), strict=True):
        assert block in log[begin:end], log


def test_a_step_in_the_backward_pass_has_few_gradients_at_once() -> None:
    def peak(apart: bool, **options: Any) -> int:
        model = ORTModule(layers(8, 128), options=Options(**options))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepper = step_in_backward(optimizer) if apart else None

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        found = peak_of(step)
        assert stepper is None or repr(stepper).endswith("16 parameters)")
        return found

    x = torch.randn(2, 128, dtype=torch.double)
    weight = 128 * 128 * 8
    assert peak(False) >= 8 * weight
    assert peak(True, segments=1) >= 8 * weight, "all are there when the first is used"
    assert peak(True) <= 4 * weight


def test_a_copy_of_the_module_has_parts_of_its_own() -> None:
    wrapped = ORTModule(layers(), options=Options(segments=4))
    x = torch.randn(3, 8, dtype=torch.double)
    wrapped(x).sum().backward()
    other = copy.deepcopy(wrapped)
    other.zero_grad()
    other(x).sum().backward()
    same_gradients(other, wrapped)


@pytest.mark.parametrize("count", [0, -1, "many", True])
def test_a_count_that_is_none(count: Any) -> None:
    with pytest.raises(OptionError, match="segments"):
        Options(segments=count)
