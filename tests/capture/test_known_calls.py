"""Layers that make the same calls run them once, and whatever differs between layers stays as eager has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import pair, same_step
from torch import nn

from onnxtrain import ORTModule

Tensor = torch.Tensor


class Layer(nn.Module):
    """One of several, which knows which one it is."""

    def __init__(self, number: int, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.number, self.code = number, code
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, self.linear(x))


class Layers(nn.Module):
    """Layers of the same code, one after the other."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, code) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _known(wrapped: ORTModule) -> int:
    (entry, *_) = wrapped.__dict__["_ort_sessions"].entries
    return entry.session.bound.report.known


def _written_view(layer: Layer, x: Tensor) -> Tensor:
    y = x * 2
    y[1:][:, 1:3] *= 3
    y.view(-1).add_(1)
    return y.t().t()


def _base_read_after_its_view_was_written(layer: Layer, x: Tensor) -> Tensor:
    y = x + 1
    y.reshape(-1, 2, 2).transpose(1, 2)[:, 0].mul_(0.5)
    return y * x


def _written_without_gradient(layer: Layer, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    row = y[0]
    row.copy_(x[0])
    return x + y if y.requires_grad else x - y


def _counted_calls(layer: Layer, x: Tensor) -> Tensor:
    layer.seen += x.detach().mean()
    return x + layer.seen


def _another_window(layer: Layer, x: Tensor) -> Tensor:
    return F.avg_pool1d(x, 3 if layer.number % 2 else 1, stride=1, padding=layer.number % 2)


def _another_drop_rate(layer: Layer, x: Tensor) -> Tensor:
    return F.dropout(x, 0.0, training=True) * (1 + 0.1 * layer.number)


def _gradient_stopped_in_one(layer: Layer, x: Tensor) -> Tensor:
    return x.detach() + 1 if layer.number == 1 else x.view_as(x) + 1


def _no_gradients_in_one(layer: Layer, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(layer.number != 1):
        return x.tanh().view(x.shape)


def _autocast_in_one(layer: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=layer.number == 1):
        return (x.float() @ x.float().t()).double() @ x


def _types(layer: Layer, x: Tensor) -> Tensor:
    return x + torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2, 2))).reshape(x.shape)


def _parts_written(layer: Layer, x: Tensor) -> Tensor:
    first, second = (x * 1).split(2, -1)
    return torch.cat([first.tanh(), second * layer.number], -1)


def _laid_out_anew(layer: Layer, x: Tensor) -> Tensor:
    y = x.t().contiguous()
    return y.view(-1).view(4, -1).t().contiguous() if y.is_contiguous() else x


def _sizes_read(layer: Layer, x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[0], layer.number + 1, dtype=x.dtype)
    return x + ones.sum(1, keepdim=True) / x.numel()


CODE = (
    *(_written_view, _base_read_after_its_view_was_written, _written_without_gradient, _counted_calls),
    *(_another_window, _another_drop_rate, _gradient_stopped_in_one, _no_gradients_in_one, _autocast_in_one),
    *(_types, _parts_written, _laid_out_anew, _sizes_read),
)


@pytest.mark.parametrize("code", CODE, ids=lambda c: c.__name__.strip("_").replace("_", " "))
def test_as_eager(code: Callable[[Any, Tensor], Tensor]) -> None:
    """Three layers of every code, at two sizes; calls are known from the second layer on."""
    torch.manual_seed(0)
    wrapped, eager = pair(Layers(code))
    for size in (5, 3):
        same_step(wrapped, eager, torch.rand(size, 4, dtype=torch.float64, requires_grad=True))
    assert _known(wrapped) > 2


def test_a_counter_in_a_closure() -> None:
    """Code runs in every layer as it stands: what it does once, it does once."""
    calls = []

    def code(layer: Layer, x: Tensor) -> Tensor:
        calls.append(layer.number)
        return x * len(calls)

    module = Layers(code)
    x = torch.rand(3, 4, dtype=torch.float64)
    expected = module(x)
    calls.clear()
    torch.testing.assert_close(ORTModule(module)(x), expected)


def test_a_hook_on_one_layer() -> None:
    """It runs there, not in the others."""
    module = Layers(lambda layer, x: x.tanh())
    module.layers[1].register_forward_hook(lambda layer, args, output: output * 3)
    same_step(*pair(module), torch.rand(3, 4, dtype=torch.float64))


def test_a_parameter_of_two_layers() -> None:
    """Its gradient is the sum of both."""
    module = Layers(lambda layer, x: x.tanh())
    module.layers[2].linear = module.layers[0].linear
    same_step(*pair(module), torch.rand(3, 4, dtype=torch.float64))


def test_a_list_of_the_parent_that_layers_fill() -> None:
    """Each layer adds its own."""

    class Collects(Layers):
        def forward(self, x: Tensor) -> Tensor:
            found: list[Tensor] = []
            for layer in self.layers:
                x = layer(x)
                found.append(x)
            return torch.stack(found).sum(0)

    same_step(*pair(Collects(lambda layer, x: x.tanh())), torch.rand(3, 4, dtype=torch.float64))


def test_how_many_calls_a_trace_ran() -> None:
    """They do not grow with the number of layers, and ``explain`` says so."""
    ran = []
    for count in (2, 8):
        wrapped = ORTModule(Layers(lambda layer, x: x.tanh(), count))
        wrapped(torch.rand(3, 4, dtype=torch.float64)).sum().backward()
        (entry,) = wrapped.__dict__["_ort_sessions"].entries
        ran.append(entry.session.bound.report.recorded)
        assert f"{entry.session.bound.report.known} of them written from the record" in wrapped.explain()
    assert ran[0] == ran[1]
