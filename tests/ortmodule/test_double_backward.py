"""Gradients that are differentiated again: gradient penalties, meta-learning, equations, transforms of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import captures, pair
from torch import nn
from torch.autograd import forward_ad

from onnxtrain import Options, ORTModule
from onnxtrain.engine.deferred import DeferredTensor
from onnxtrain.errors import GradientError

Tensor = torch.Tensor
Step = Callable[[nn.Module, int], Tensor]
STEPS = 20


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _penalty(*shape: int) -> Step:
    """WGAN-GP: the norm of the critic's gradient at points between real and made ones."""

    def step(critic: nn.Module, number: int) -> Tensor:
        real, made = torch.randn(2, 4 + number % 3, *shape)
        share = torch.rand(len(real), *[1] * len(shape))
        between = (share * real + (1 - share) * made).requires_grad_()
        scores = critic(between)
        (slope,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
        penalty = 10 * (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        loss = critic(made).mean() - critic(real).mean() + penalty
        loss.backward()
        return loss.detach()

    return step


def _equation(net: nn.Module, number: int) -> Tensor:
    """Burgers' equation: second derivatives by the place, then the gradient of their residual."""
    x, t = torch.rand(2, 16, 1).requires_grad_().unbind()
    u = net(torch.cat([x, t], 1))
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    loss = (u_t + u * u_x - 0.01 * u_xx).square().mean()
    loss = loss + (net(torch.cat([x, torch.zeros_like(t)], 1)) + torch.sin(3.14 * x)).square().mean()
    loss.backward()
    return loss.detach()


def _meta(net: nn.Module, number: int) -> Tensor:
    """MAML: two steps on the weights inside, differentiated outside."""
    total = torch.zeros(())
    for _ in range(2):
        target, support, query = torch.randn(3, 1), torch.randn(5, 3), torch.randn(5, 3)
        fast = dict(net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(net, fast, support), support @ target)
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
        total = total + F.mse_loss(torch.func.functional_call(net, fast, query), query @ target)
    total.backward()
    return total.detach()


class Two(nn.Module):
    """One body, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.kind = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.value(hidden), self.kind(hidden)


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def _surgery(net: nn.Module, number: int) -> Tensor:
    """PCGrad: the gradients of two losses, one after the other, each without its conflict with the other."""
    x = torch.randn(6, 4)
    value, kind = net(x)
    losses = [(value - x.sum(1, True)).square().mean(), F.cross_entropy(kind, torch.randint(0, 3, (6,)))]
    own = list(net.parameters())
    a, b = (_flat(torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True), own) for loss in losses)
    conflict = (a @ b).clamp(max=0)
    merged = a - conflict / b.square().sum() * b + b - conflict / a.square().sum() * a
    for p, part in zip(own, merged.split([p.numel() for p in own]), strict=True):
        p.grad = part.view_as(p).clone()
    return sum(losses).detach()  # type: ignore[union-attr]


def _curvature(net: nn.Module, number: int) -> Tensor:
    """The product of the Hessian and a vector as the gradient."""
    value, kind = net(torch.randn(6, 4))
    own = list(net.parameters())
    slopes = torch.autograd.grad(value.square().mean() + kind.pow(3).mean(), own, create_graph=True)
    directions = [torch.randn_like(p) for p in own]
    along = sum((s * d).sum() for s, d in zip(slopes, directions, strict=True))
    for p, product in zip(own, torch.autograd.grad(along, own), strict=True):
        p.grad = product
    return along.detach()  # type: ignore[union-attr]


def _critic() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2), nn.AvgPool2d(2), nn.Dropout(0.1), nn.Flatten()),
        nn.Linear(32, 1),
    )


def _small_critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))


def _mlp(first: int, width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(first, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "wgan-gp, convolutions": (_critic, _penalty(3, 8, 8)),
    "wgan-gp, batch norm": (_small_critic, _penalty(6)),
    "burgers": (lambda: _mlp(2), _equation),
    "maml": (lambda: _mlp(3), _meta),
    "pcgrad": (Two, _surgery),
    "hessian times vector": (Two, _curvature),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_goes_as_in_eager(name: str) -> None:
    make, step = PROGRAMS[name]
    torch.manual_seed(0)
    models = pair(make())
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9) for m in models]
    for number in range(STEPS):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            losses.append(step(model, number))
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert captures(models[0]) == 1


class First(nn.Module):
    """The first result of a module that has several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return made[0] if isinstance(made, tuple) else made


class Part(nn.Module):
    """The last part, of which the operator that gives all of them is left to torch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.split(2, 1)[-1]


IMAGE, ROWS, SEQUENCE = (2, 3, 8, 8), (5, 6), (2, 7, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), IMAGE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), IMAGE),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMAGE),
    "GroupNorm": (lambda: nn.GroupNorm(3, 3), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(6), ROWS),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-6), ROWS),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "Unfold": (lambda: nn.Unfold(2), IMAGE),
    "LSTM": (lambda: nn.LSTM(8, 4, batch_first=True), SEQUENCE),
    "GRU": (lambda: nn.GRU(8, 4), SEQUENCE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), ROWS),
    "Dropout": (lambda: nn.Dropout(0.3), ROWS),
    "GELU": (nn.GELU, ROWS),
    "SELU, left to torch": (nn.SELU, ROWS),
    "CELU, left to torch": (lambda: nn.CELU(0.3), ROWS),
    "Mish": (nn.Mish, ROWS),
    "Softplus": (lambda: nn.Softplus(0.7), ROWS),
    "Hardswish": (nn.Hardswish, ROWS),
    "GLU": (nn.GLU, ROWS),
    "a part of what torch splits": (Part, ROWS),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), ROWS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_of_a_layer(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    models, x = pair(First(make())), torch.randn(shape)
    found = []
    for model in models:
        torch.manual_seed(5)
        own = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(own).square().sum(), own, create_graph=True)
        leaves = [own, *model.parameters()]
        second = torch.autograd.grad(slope.square().sum(), leaves, allow_unused=True)
        found.append(
            [slope.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, second, strict=True))]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda m, x: torch.func.grad(lambda p: torch.func.functional_call(m, p, x).sum())(
        dict(m.named_parameters())
    ),
    "vmap": lambda m, x: torch.func.vmap(m)(x),
    "gradients of each sample": lambda m, x: torch.func.vmap(
        torch.func.grad(lambda p, row: torch.func.functional_call(m, p, row[None]).sum()), (None, 0)
    )(dict(m.named_parameters()), x),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x[0]),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),)),
    "hessian": lambda m, x: torch.autograd.functional.hessian(lambda v: m(v).sum(), x),
    "jacobian": lambda m, x: torch.autograd.functional.jacobian(m, x),
    "forward mode": lambda m, x: _tangent(m, x),
    "jit.trace": lambda m, x: torch.jit.trace(m, x)(x),
    "compile": lambda m, x: torch.compile(m, backend="eager")(x),
    "export": lambda m, x: torch.export.export(m, (x,)).module()(x),
}  # fmt: skip


def _tangent(model: nn.Module, x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_transforms_of_torch_see_the_module(name: str, is_captured: bool) -> None:
    torch.manual_seed(0)
    wrapped, eager = pair(_mlp(3, 4))
    x = torch.randn(5, 3)
    if is_captured:
        wrapped(x).sum().backward()
    leaves = [torch.utils._pytree.tree_leaves(TRANSFORMS[name](m, x)) for m in (wrapped, eager)]
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours, theirs)
    fresh = ORTModule(copy.deepcopy(eager))  # the process is as it was
    torch.testing.assert_close(fresh(x), eager(x))
    assert captures(fresh) == 1


def test_several_gradients_at_once_are_refused_with_words() -> None:
    with pytest.raises(GradientError, match=r"at once[\s\S]*vectorize=False"):
        torch.autograd.functional.jacobian(ORTModule(_mlp(3)), torch.randn(5, 3), vectorize=True)


def test_it_is_told_and_written_beside_the_rest(tmp_path: Path) -> None:
    model = ORTModule(_mlp(3), options=Options(save_onnx=tmp_path, onnx_prefix="net"))
    x = torch.randn(5, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    lines = model.explain().splitlines()
    assert any("gradients of 7 tensors from" in line and "graph of their own" in line for line in lines)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"net_optimized_training.onnx", "net_gradient_optimized_training.onnx"} <= names


def test_what_changed_since_the_forward_pass_is_noticed() -> None:
    model, x = ORTModule(_mlp(3)), torch.randn(5, 3, requires_grad=True)
    made = model(x).square().sum()
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    with pytest.raises(GradientError, match=r"modified in place|changed since"):
        torch.autograd.grad(made, x, create_graph=True)


def test_an_output_that_was_read_late_is_differentiated_twice() -> None:
    """Scores beside a loss are computed when somebody reads them: of the first step, after it."""
    torch.manual_seed(0)
    wrapped, eager = pair(Tagger(), density_threshold=0.95)
    labels = torch.full((3, 8), -100).index_fill(1, torch.tensor([0, 3]), 2)
    for is_late in (True, False):
        ids, found = torch.randint(0, 20, (3, 8)), []
        for model in (wrapped, eager):
            model.zero_grad()
            loss, scores = model(ids, labels)
            assert model is eager or isinstance(scores, DeferredTensor) is is_late
            own = list(model.parameters())
            slopes = torch.autograd.grad(scores.square().sum(), own, create_graph=True)
            (loss + sum(slope.square().sum() for slope in slopes)).backward()
            found.append([p.grad for p in own])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)


class Tagger(nn.Module):
    """A loss of few of the tokens, and the scores of all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(torch.tanh(self.inner(self.words(ids))))
        return F.cross_entropy(scores.view(-1, 5), labels.view(-1)), scores
