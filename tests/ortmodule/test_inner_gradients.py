"""``torch.autograd.grad`` and ``torch.func`` within a forward pass are part of the graph, and differentiated as it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures, pair, same_step
from torch import nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap

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


def of_each_row(m: Net, x: Tensor) -> Any:
    """Slopes and their slopes, of one variable and of all."""
    u = lambda t, y, z: m.net(torch.stack([t, y, z])).squeeze()  # noqa: E731
    t, y, z = x.unbind(1)
    residual = vmap(torch.func.grad(u))(t, y, z) - vmap(torch.func.grad(torch.func.grad(u, 1), 1))(t, y, z)
    slopes, values = vmap(torch.func.grad_and_value(lambda a: m.net(a).sum()))(x)
    with torch.no_grad():
        apart = vmap(torch.func.grad(lambda a: m.net(a).sum()))(x)
    return residual.square().mean() + (slopes.sum(-1) * values).sum() + (apart * x).sum(), apart


def norms_of_weights(m: Net, x: Tensor) -> Any:
    """The gradients of each example apart."""
    weights = dict(m.net.named_parameters())
    loss = lambda w, a: functional_call(m.net, w, (a,)).square().sum()  # noqa: E731
    each = vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    return sum(g.flatten(1).norm(dim=1).sum() for g in each.values())


def curvature(m: Net, x: Tensor) -> Any:
    """Laplacians in three ways, and a product with the Hessian."""
    f = lambda a: m.net(a).sum()  # noqa: E731
    traces = vmap(lambda a: jacrev(torch.func.grad(f))(a).trace())(x)
    also = vmap(hessian(f))(x).diagonal(dim1=1, dim2=2).sum(1) * m.scale
    forward = vmap(jacfwd(jacfwd(f)))(x).square().sum()
    _, product = jvp(torch.func.grad(f), (x,), (x.cos(),))
    each = vmap(lambda a, v: jvp(torch.func.grad(f), (a,), (v,))[1])(x, x.sin())
    return traces.square().mean() + also.mean() + forward + (product * each).sum(), traces


def jacobians(m: Net, x: Tensor) -> Any:
    of_row = jacrev(lambda a: (a.sin() * m.scale, {"sum": m.net(a).sum()}))(x[0])
    of_both = jacrev(lambda a, b: (a * b).tanh() * m.scale, argnums=(0, 1), chunk_size=1)(x[0], x[1])
    of_each = vmap(jacrev(lambda a: torch.cat([m.net(a), a * m.scale])))(x)
    of_all, aux = jacfwd(lambda a: (m.net(a), a.exp()), has_aux=True)(x)
    parts = (of_row[0], of_row[1]["sum"], *of_both, of_each, of_all, aux)
    return torch.stack([p.square().sum() for p in parts]).sum(), of_each


def motion(m: Net, x: Tensor) -> Any:
    """What a Lagrangian of places and speeds says of forces, by mixed derivatives."""
    energy = lambda q, v: m.net(torch.cat([q, v])).squeeze() * m.scale  # noqa: E731

    def force(q: Tensor, v: Tensor) -> Tensor:
        mixed = jacrev(jacrev(energy, 1), 0)(q, v)
        return hessian(energy, 1)(q, v) @ v + torch.func.grad(energy)(q, v).sum() - mixed @ q

    return vmap(force)(x[:, :1], x[:, 1:]).square().mean()


def products(m: Net, x: Tensor) -> Any:
    y, back, aux = vjp(lambda a, s: (m.net(a) * s, a * 2), x, m.scale, has_aux=True)
    dx, ds = back(y)
    value, pushed = jvp(lambda a: {"y": m.net(a)}, (x,), (dx,))
    rows = m.net[0](x[0])
    (several,) = grad(rows, x, torch.eye(8).to(x), is_grads_batched=True, create_graph=True)
    return (dx * aux).sum() + ds * (value["y"] * pushed["y"]).sum() + several.square().sum()


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


def of_several_seeds(m: Net, x: Tensor) -> Any:
    y = m.net(x).sum(0)
    rows = vmap(lambda dy: grad(y, x, dy, create_graph=True)[0])(torch.eye(y.shape[0], dtype=x.dtype))
    return rows.square().sum()


PROGRAMS = [forces, of_a_copy, equation, penalty, inner_step, detached, of_several, unused, transformed]
PROGRAMS += [of_each_row, norms_of_weights, curvature, jacobians, motion, products, of_several_seeds]


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


def dual(m: Net, x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = m.net(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def of_what_is_the_same(m: Net, x: Tensor) -> Any:
    y = m.net(x)
    return vmap(lambda w: grad((y * w).sum(), x)[0])(torch.ones(3, *y.shape))


@pytest.mark.parametrize(
    ("program", "what", "cure"),
    [
        (dual, "forward-mode automatic differentiation", "torch.func.jvp"),
        (of_what_is_the_same, "the same for all elements", "torch.func.grad"),
        (lambda m, x: jvp(m.net, (x,), (x.double(),))[1], "along tangents of another type", "cast the tangents"),
    ],
)
def test_what_is_refused(program: Callable[[Net, Tensor], Any], what: str, cure: str) -> None:
    with pytest.raises(CaptureError, match=what) as caught:
        ORTModule(Net(program))(torch.randn(4, 3, requires_grad=True))
    assert cure in caught.value.cure and Path(__file__).name in caught.value.source


FUNCTIONS = [torch.tanh, torch.sigmoid, torch.relu, torch.sin, nn.functional.gelu, nn.functional.silu]
FUNCTIONS += [nn.functional.softplus, nn.functional.elu, lambda a: a.softmax(-1), lambda a: a.log_softmax(-1)]
FUNCTIONS += [lambda a: nn.functional.layer_norm(a, (3,)), lambda a: a.cumsum(0), lambda a: a.amax(0), torch.norm]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_along_tangents(function: Callable[[Tensor], Tensor]) -> None:
    """The last operator may have a gradient that is one of ours, and has to be differentiated."""

    class Pushed(nn.Module):
        def forward(self, x: Tensor, dx: Tensor) -> Any:
            value, along = jvp(function, (x,), (dx,))
            (back,) = grad(function(x * 2), x, value.detach(), create_graph=True)
            return value, along, jacfwd(function)(x[:2]), back

    x, dx = torch.randn(4, 3, dtype=torch.double, requires_grad=True), torch.randn(4, 3, dtype=torch.double)
    for ours, eager in zip(ORTModule(Pushed())(x, dx), Pushed()(x, dx), strict=True):
        torch.testing.assert_close(ours, eager)


AXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "out": lambda x, at: vmap(torch.sin, out_dims=1)(x),
    "out, changed": lambda x, at: vmap(torch.sin, out_dims=1)(x).add_(1),
    "out, changed in part": lambda x, at: vmap(torch.sin, out_dims=-1)(x).index_fill_(0, at[:1], 0).exp(),
    "in and out": lambda x, at: vmap(lambda row: row.softmax(-1), -1, -1)(x),
    "of several": lambda x, at: vmap(lambda row: (row * 2, {"sum": row.sum()}), out_dims=(-1, 0))(x)[0],
    "in another": lambda x, at: vmap(vmap(torch.exp, out_dims=1), in_dims=1, out_dims=2)(x),
    "of a slope": lambda x, at: vmap(torch.func.grad(lambda a: a.tanh().sum()), out_dims=2)(x),
    "of nothing": lambda x, at: vmap(lambda row: torch.ones(3, dtype=row.dtype))(x) * x.sum(),
    "a place": lambda x, at: vmap(lambda row, i: row[i])(x, at),
    "a place from the end": lambda x, at: vmap(lambda row, i: row[:, -1 - i])(x, at),
    "two places": lambda x, at: vmap(lambda row, i: row[i, ..., i])(x, at),
    "a place among others": lambda x, at: vmap(lambda row, i: row[None, i, 1:])(x, at),
    "a place within all": lambda x, at: vmap(lambda row, i: row[..., i] + row[0, 0])(x, at),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_and_places_of_mapped_functions(name: str) -> None:
    class Mapped(nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> Any:
            return AXES[name](x, at)

    wrapped = ORTModule(Mapped())
    for rows in (3, 2, 4):
        x = torch.randn(rows, 3, 5, dtype=torch.double, requires_grad=True)
        at = torch.randint(0, 3, (rows,))
        ours, eager = wrapped(x, at), Mapped()(x, at)
        torch.testing.assert_close(ours, eager)
        weight = torch.randn_like(eager)
        same = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, eager))
        torch.testing.assert_close(*same)


@pytest.mark.parametrize("call", [lambda y: y.backward(), torch.autograd.backward])
def test_a_whole_backward_pass_is_refused(call: Callable[[Tensor], None]) -> None:
    def program(m: Net, x: Tensor) -> Any:
        y = m.net(x).sum()
        call(y)
        return y

    with pytest.raises(CaptureError, match="leaves gradients on parameters") as caught:
        ORTModule(Net(program))(torch.randn(4, 3))
    assert "autograd.grad" in caught.value.cure


def _normed(g: Tensor) -> Tensor:
    norm = g.flatten().norm()
    return g.mul_(1 / norm)


def _scaled(g: Tensor) -> Tensor:
    return g.mT.reshape(-1).mul_(2)


def _shared(g: Tensor) -> Tensor:
    g.mT.reshape(-1).mul_(2)
    return g


def _shared_by_the_other(g: Tensor) -> Tensor:
    flat = g.mT.flatten()
    g[0] = 1
    return flat


@pytest.mark.parametrize(
    ("change", "is_open"), [(_normed, False), (_scaled, False), (_shared, True), (_shared_by_the_other, True)]
)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_gradient_shares_memory_with_its_reshape_or_not(
    change: Callable[[Tensor], Tensor], is_open: bool, is_contiguous: bool
) -> None:
    def program(m: Net, x: Tensor) -> Tensor:
        return change(torch.func.grad(lambda a: (a * a.sin()).mean())(x)) * m.scale

    wrapped, eager = pair(Net(program))
    for rows in (4, 3):
        x = torch.randn(rows, 5) if is_contiguous else torch.randn(5, rows).mT
        if is_open:
            with pytest.raises(CaptureError, match="to a gradient, or to what") as caught:
                wrapped(x)
            assert __file__ in caught.value.source and caught.value.cure
        else:
            torch.testing.assert_close(wrapped(x), eager(x))


SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "a product with a zero": (lambda x: x.prod(1).exp(), [0.0, 2.0, -1.5, 0.5]),
    "a product with zeros": (lambda x: (x.prod() + x.prod(1, keepdim=True).sin()) * 2, [0.0, 2.0, 0.0, 0.5]),
    "a logarithm of a sigmoid": (nn.functional.logsigmoid, [0.0, 3.0, -2.0, 0.0]),
    "a product of zeros alone": (lambda x: x.prod(1), [0.0, 0.0, 0.0, 0.0]),
    "what would overflow": (lambda x: nn.functional.elu(x) + nn.functional.elu(x, 0.5), [800.0, -800.0, 0.0, 1.0]),
    "logits of 0": (
        lambda x: nn.functional.binary_cross_entropy_with_logits(x, x.detach() * 0 + 0.3),
        [0.0, 3.0, -2.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_further_derivatives_where_the_first_is_special(name: str) -> None:
    function, values = SPECIAL[name]
    x = torch.tensor([values] * 3, dtype=torch.float64) * torch.linspace(1, 2, 3)[:, None].double()
    slope = pair(Net(lambda m, x: grad(function(x * m.scale).sum(), x, create_graph=True)[0]).double())
    curve = pair(Net(lambda m, x: hessian(lambda y: function(y * m.scale).sum())(x)).double())
    for rows in (2, 1, 3):
        same_step(*slope, x[:rows].clone().requires_grad_())
        with torch.no_grad():  # of the next derivative eager's is no number
            same_step(*curve, x[:rows])


class Masked(nn.Module):
    """Attention with a mask that is a gradient itself."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.func.vjp(torch.sigmoid, x)[1](torch.ones_like(x))[0]
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.sort(1)[0]).mean()


def test_a_gradient_as_a_mask_is_trained() -> None:
    wrapped, eager = pair(Masked())
    for size in (3, 5):
        same_step(wrapped, eager, torch.randn(2, size, size, dtype=torch.float64, requires_grad=True))


class AsksForGradients(nn.Module):
    """What ``torch.func`` gives requires a gradient where its arguments do, or what the function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = torch.func.jvp(torch.tanh, (x,), (x,))
        of_layer = torch.func.grad(lambda z: self.layer(z).square().sum())(x)
        twice = torch.func.grad(lambda z: torch.func.grad(lambda q: (q**3).sum())(z).sum())(x)
        found, back = torch.func.vjp(torch.sin, x)
        several = value, slope, of_layer, twice, found, *back(x), value * of_layer
        asked = [2 * float(t.requires_grad) + float(t.is_leaf) for t in several]
        return torch.tensor(asked), self.layer(x) + sum(several)


@pytest.mark.parametrize("differentiated", [False, True])
def test_what_requires_a_gradient_is_asked(differentiated: bool) -> None:
    wrapped, eager = pair(AsksForGradients())
    for is_other in (False, True):
        x = torch.randn(3, 4, requires_grad=differentiated != is_other)
        torch.testing.assert_close(wrapped(x), eager(x))
