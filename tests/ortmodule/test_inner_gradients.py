"""``torch.autograd.grad`` within a forward pass is part of the graph, and is differentiated as the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures, pair
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError, GradientError

Tensor = torch.Tensor
grad = torch.autograd.grad


def mlp(width: int = 3, out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, out))


class Net(nn.Module):
    """A network, and a program around it."""

    def __init__(self, program: Callable[[Net, Tensor], Any], net: nn.Module | None = None) -> None:
        super().__init__()
        self.program, self.net = program, net or mlp()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)


def forces(m: Net, x: Tensor) -> Any:
    x = x.requires_grad_(True)
    energy = m.net(x).sum()
    (slope,) = grad(energy, x, create_graph=True)
    return energy.square() + (slope - x.detach()).square().sum(), -slope


def of_a_copy(m: Net, x: Tensor) -> Any:
    position = x.detach().clone().requires_grad_(True)
    (slope,) = grad(m.net(position * m.scale), position, torch.ones(len(x), 1, dtype=x.dtype), create_graph=True)
    return slope.square().mean()


def equation(m: Net, x: Tensor) -> Any:
    """u_t + u u_x = ν u_xx at points in three dimensions, of which two count."""
    x = x.detach().requires_grad_(True)
    u = m.net(x)
    first = grad(u.sum(), x, create_graph=True)[0]
    second = grad(first[:, 0].sum(), x, create_graph=True)[0]
    residual = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]
    return residual.square().mean() + u.square().mean()


def penalty(m: Net, x: Tensor) -> Any:
    mixed = (0.3 * x + 0.7 * x.flip(0)).requires_grad_(True)
    slope = grad(outputs=m.net(mixed), inputs=mixed, grad_outputs=torch.ones(len(x), 1).to(x), create_graph=True)[0]
    return m.net(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def inner_step(m: Net, x: Tensor) -> Any:
    """A step of gradient descent on the support half, a loss on the other."""
    weights = dict(m.net.named_parameters())
    support = torch.func.functional_call(m.net, weights, (x[:2],)).square().mean()
    slopes = grad(support, list(weights.values()), create_graph=True)
    fast = {n: w - 0.1 * dw for (n, w), dw in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(m.net, fast, (x[2:],)).square().mean()


def detached(m: Net, x: Tensor) -> Any:
    """Without ``create_graph`` it is a number."""
    hidden = m.net[0](x)
    y = m.net[1:](hidden).square().sum()
    (importance,) = grad(y, hidden, retain_graph=True)
    return (importance * hidden).sum() + y


def of_several(m: Net, x: Tensor) -> Any:
    a = m.net[0](x)
    b = m.net[2](torch.tanh(a))
    y, z = b.square().sum(), (a * b).sum()
    da, db, dx = grad([y, z], [a, b, m.net[0].weight], [torch.full_like(y, 2.0), m.scale], create_graph=True)
    return da.square().sum() + db.sum() + dx.square().sum() + m.net(x).sum()


def unused(m: Net, x: Tensor) -> Any:
    y = m.net(x).sum()
    first, second = grad(y, [m.net[0].weight, m.scale], create_graph=True, allow_unused=True, materialize_grads=True)
    return first.square().sum() + second + m.scale * y


def within_no_grad(m: Net, x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return grad(m.net(x).sum(), x)[0]


def transformed(m: Net, x: Tensor) -> Any:
    """A gradient is one of what a function does with its argument, not of what it reads beside."""
    beside = torch.func.grad(lambda a: (a.sin() * a * x).sum())(x)
    slope, value = torch.func.grad_and_value(lambda a: m.net(a).sum())(x)
    of_both, aux = torch.func.grad(lambda a, s: ((m.net(a) * s).sum(), a * 2), argnums=(0, 1), has_aux=True)(x, m.scale)
    again = torch.func.grad(lambda a: torch.func.grad(lambda z: (z**3).sum())(a).sum())(x)
    of_weights = torch.func.grad(lambda p: torch.func.functional_call(m.net, p, (x,)).sum())(
        dict(m.net.named_parameters())
    )
    with torch.no_grad():
        apart = torch.func.grad(lambda a: (a.exp() * x).sum())(x)
    parts = (beside, slope, value, *of_both, aux, again, *of_weights.values())
    return torch.stack([p.square().sum() for p in parts]).sum() + apart.mean(), apart


class Block(nn.Module):
    """Attention, normalization and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.LayerNorm(3), nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)[None]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # eager has its second derivative
            found = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return nn.functional.silu(self.convolution(found.transpose(1, 2))).mean((0, 1))[:, None]


PROGRAMS = [forces, of_a_copy, equation, penalty, inner_step, detached, of_several, unused, transformed]


def outcome(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_(True)
    found = model(x)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    outputs[0].backward()
    return [y.detach() for y in outputs], [p.grad for p in (*model.parameters(), x)]


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_is_eager_s(program: Callable[[Net, Tensor], Any], backend: str) -> None:
    dtype = torch.double if backend == "torch" else torch.float  # onnxruntime has no erf of doubles
    wrapped, eager = pair(Net(program).to(dtype), backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-4) for m in (wrapped, eager)]
    for rows in (4, 6, 5):
        x = torch.randn(rows, 3, dtype=dtype)
        close = {} if dtype is torch.double else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(outcome(wrapped, x), outcome(eager, x), **close)
        for optimizer in optimizers:
            optimizer.step()
    assert captures(wrapped) == 1


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), mlp())


@pytest.mark.parametrize("program", [forces, of_a_copy, penalty, equation])
@pytest.mark.parametrize("net", [Block, lambda: Recurrent(), normalized])
def test_through_other_layers(net: Callable[[], nn.Module], program: Callable[[Net, Tensor], Any]) -> None:
    if net is normalized and program is equation:
        pytest.skip("eager PyTorch has no third derivative of batch normalization since 2.15")
    wrapped, eager = pair(Net(program, net()).double())
    for _ in range(2):
        x = torch.randn(4, 3, dtype=torch.double)
        torch.testing.assert_close(outcome(wrapped, x), outcome(eager, x), rtol=1e-9, atol=1e-12)


class Recurrent(nn.Module):
    """An LSTM over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None])[0][:, 0])


@pytest.mark.parametrize("enabled", [False, True])
def test_inference(enabled: bool) -> None:
    wrapped, eager = pair(Net(within_no_grad).eval())
    with torch.set_grad_enabled(enabled):
        x = torch.randn(4, 3)
        torch.testing.assert_close(wrapped(x), eager(x))


def test_a_batch_that_does_not_require_a_gradient() -> None:
    wrapped, eager = pair(Net(penalty))
    x = torch.randn(4, 3)
    for model in (wrapped, eager):
        model(x).backward()
    for (name, a), b in zip(wrapped.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert x.grad is None


def test_an_input_that_is_not_used() -> None:
    def program(m: Net, x: Tensor) -> Any:
        return grad(m.net(x).sum(), m.scale)[0] + x.sum()

    with pytest.raises(GradientError, match="not used") as caught:
        ORTModule(Net(program))(torch.randn(4, 3))
    assert "allow_unused" in caught.value.cure and Path(__file__).name in caught.value.source


def test_several_at_once_are_refused() -> None:
    def program(m: Net, x: Tensor) -> Any:
        return grad(m.net(x), m.scale, torch.eye(4)[..., None], is_grads_batched=True)[0]

    with pytest.raises(CaptureError, match="is_grads_batched"):
        ORTModule(Net(program))(torch.randn(4, 3))


@pytest.mark.parametrize("call", [lambda y: y.backward(), torch.autograd.backward])
def test_a_whole_backward_pass_is_refused(call: Callable[[Tensor], None]) -> None:
    def program(m: Net, x: Tensor) -> Any:
        y = m.net(x).sum()
        call(y)
        return y

    with pytest.raises(CaptureError, match="leaves gradients on parameters") as caught:
        ORTModule(Net(program))(torch.randn(4, 3))
    assert "autograd.grad" in caught.value.cure
