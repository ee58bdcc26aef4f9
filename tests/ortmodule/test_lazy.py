"""Lazy modules, and layers made in forward: a call in eager PyTorch makes them; the next ones have a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity import captures
from torch import nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.LazyLinear(4), nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).relu()


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.LazyLinear(4), (5, 3)),
        (lambda: nn.LazyConv2d(4, 3), (2, 3, 8, 8)),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), (5, 3)),
        (nn.LazyBatchNorm2d, (2, 3, 4, 4)),
        (Net, (5, 3)),
    ],
)
def test_lazy_modules_are_trained(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    module = make()
    wrapped = ORTModule(module, options=Options(summary=False))
    for n in (0, 1, 2):
        x = torch.randn(shape[0] + n, *shape[1:])
        losses = []
        for index, model in enumerate((expected, wrapped)):
            torch.manual_seed(7)  # the parameters' first content is drawn
            losses.append(model(x).pow(3).mean())
            losses[index].backward()
        torch.testing.assert_close(losses[1], losses[0])
    gradients = [[p.grad for p in m.parameters()] for m in (expected, wrapped)]
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(list(module.buffers()), list(expected.buffers()))
    assert captures(wrapped) == 1
    assert type(module) is type(expected) and isinstance(wrapped, type(expected)) and isinstance(wrapped, ORTModule)


def test_explain_tells_of_the_call_that_made_the_parameters() -> None:
    wrapped = ORTModule(Net(), options=Options(summary=False))
    wrapped(torch.ones(2, 3))
    assert "1 call in eager PyTorch, which set the module up" in wrapped.explain()


class Built(nn.Module):
    """Builds itself when it sees its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        if not self.layers:
            self.layers.extend([nn.Linear(x.shape[1], 4), nn.BatchNorm1d(4)])
            self.scale = nn.Parameter(torch.ones(4))
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class BuiltForEachLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        name = str(len(x))
        if name not in self.heads:
            self.heads[name] = nn.Linear(3, 4)
        return self.heads[name](x)


@pytest.mark.parametrize("kind, graphs, eager", [(Built, 1, 1), (BuiltForEachLength, 3, 3)])
def test_layers_made_in_forward_are_trained(kind: type[nn.Module], graphs: int, eager: int) -> None:
    expected, wrapped = kind(), ORTModule(kind(), options=Options(summary=False))
    for n in (0, 1, 2, 0, 1, 2):
        x = torch.randn(4 + n, 3)
        for model in (expected, wrapped):
            torch.manual_seed(n)
            model(x).pow(3).mean().backward()
    found, known = dict(wrapped.named_parameters()), dict(expected.named_parameters())
    assert list(found) == list(known)
    torch.testing.assert_close([p.grad for p in found.values()], [p.grad for p in known.values()])
    assert captures(wrapped) == graphs
    assert f"{eager} call" in wrapped.explain() and "in eager PyTorch, which set the module up" in wrapped.explain()


def test_a_parameter_that_every_call_makes_is_refused() -> None:
    class Anew(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(torch.ones(3))
            return x * self.weight

    wrapped = ORTModule(Anew(), options=Options(summary=False))
    wrapped(torch.ones(2, 3))
    with pytest.raises(CaptureError, match="sets weight: a parameter, and trains it then, at every call") as caught:
        wrapped(torch.ones(2, 3))
    assert caught.value.source.startswith(__file__)


class Frozen(nn.Module):
    """Decides in its first call what is trained."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.base, self.head, self.thaws = nn.Linear(3, 3), nn.Linear(3, 4), thaws

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.base.parameters():
            parameter.requires_grad = False
        y = self.head(self.base(x))
        self.base.requires_grad_(self.thaws)
        return y


def test_a_first_call_that_freezes_parameters() -> None:
    wrapped = ORTModule(Frozen(False), options=Options(summary=False))
    for rows in (2, 3):
        wrapped(torch.ones(rows, 3)).sum().backward()
    assert captures(wrapped) == 1 and wrapped.head.weight.grad is not None and wrapped.base.weight.grad is None


def test_freezing_at_every_call_is_refused() -> None:
    wrapped = ORTModule(Frozen(True), options=Options(summary=False))
    wrapped(torch.ones(2, 3))
    with pytest.raises(CaptureError, match="sets requires_grad of a parameter, at every call"):
        wrapped(torch.ones(2, 3))
