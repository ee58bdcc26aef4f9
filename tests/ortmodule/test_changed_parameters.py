"""Trained parameters that a forward pass changes where autograd does not see it: content and gradients as eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import captures
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError, OnnxTrainError


class Net(nn.Module):
    """A product whose weight, bias and scale a function changes; more layers, one of them with two names."""

    def __init__(self, change: Callable[[Any, Tensor], Any], *, after: bool = False) -> None:
        super().__init__()
        self.linear, self.change, self.after = nn.Linear(4, 4), change, after
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("done", torch.zeros((), dtype=torch.bool))
        self.again, self.embedding = self.linear, nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.after:
            self.change(self, x)
        y = self.linear(x * self.scale) + self.embedding(torch.arange(4)).sum(0)
        if self.after:
            self.change(self, x)
        return self.again(y.tanh())


def _norm_cut(m: Net, x: Tensor) -> None:
    m.linear.weight.data = torch.renorm(m.linear.weight.data, p=2, dim=0, maxnorm=0.5)


def _clamped_data(m: Net, x: Tensor) -> None:
    m.linear.weight.data.clamp_(min=0)
    m.scale.data.clamp_(0.6, 1)


def _clamped(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        m.linear.weight.clamp_(min=0)


def _clamped_through_another_name(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        m.again.weight.clamp_(min=0)


def _normed(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        m.linear.weight.copy_(F.normalize(m.linear.weight, dim=1))


def _divided(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        m.linear.weight.div_(m.linear.weight.norm(dim=1, keepdim=True))


def _foreach(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([m.linear.weight, m.scale], 0.9)


def _a_row(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        m.embedding.weight[0] = 0


def _a_row_of_the_data(m: Net, x: Tensor) -> None:
    m.embedding.weight.data[0].zero_()


def _by_the_input(m: Net, x: Tensor) -> None:
    with torch.no_grad():
        m.scale.lerp_(x.std(0), 0.1)


def _at_the_first_call(m: Net, x: Tensor) -> None:
    if not m.done:
        m.scale.data.copy_(x.std(0))
        m.done.fill_(True)


def _in_training_alone(m: Net, x: Tensor) -> None:
    if m.training:
        m.linear.weight.data.mul_(0.9)


def _through_a_view_taken_before(m: Net, x: Tensor) -> None:
    rows = m.linear.weight[1:]
    with torch.no_grad():
        rows.clamp_(-0.3, 0.3)


def _twice(m: Net, x: Tensor) -> None:
    m.linear.weight.data.clamp_(min=0)
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
        m.linear.bias.zero_()


CHANGES = [
    f for name, f in list(globals().items()) if name.startswith("_") and getattr(f, "__module__", "") == __name__
]


def _steps(called: nn.Module, module: nn.Module, count: int = 6) -> list[list[Tensor]]:
    """What some steps give, in training and not, with the parameters and gradients that there are after each."""
    optimizer, found = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9), []
    for step in range(count):
        called.train(step % 3 != 2)
        own = next(module.parameters()).dtype
        x = torch.randn(3 + step % 2, 4, generator=torch.Generator().manual_seed(step)).to(own).requires_grad_()
        optimizer.zero_grad()
        out = called(x)
        out.square().sum().backward()
        given = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
        found.append([t.detach().clone() for t in (out, *given, *module.parameters())])
        optimizer.step()
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_a_parameter_that_is_changed(change: Callable[[Any, Tensor], Any], after: bool) -> None:
    """Before it is read; or after it was, and before it is read once more: eager refuses a backward pass then, unless
    the change is hidden from it; we give the gradient at what was read."""
    torch.manual_seed(0)
    module = Net(change, after=after).double()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    if not after:
        torch.testing.assert_close(_steps(wrapped, module), _steps(eager, eager))
    else:
        with torch.no_grad():
            for x in torch.randn(3, 3, 4).double():
                torch.testing.assert_close(wrapped(x), eager(x))
        torch.testing.assert_close(dict(module.state_dict()), dict(eager.state_dict()))
    assert captures(wrapped) <= 3


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
@pytest.mark.parametrize("change", [_norm_cut, _a_row, _by_the_input], ids=lambda f: f.__name__.strip("_"))
def test_other_backends(change: Callable[[Any, Tensor], Any], backend: str) -> None:
    torch.manual_seed(0)
    module = Net(change)
    eager, wrapped = copy.deepcopy(module), ORTModule(module, Options(backend=backend))
    torch.testing.assert_close(_steps(wrapped, module, 3), _steps(eager, eager, 3), rtol=1e-4, atol=1e-5)


class Constrained(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x).tanh()


@pytest.mark.parametrize("options", [Options(), Options(memory_budget="min"), Options(verify=True)], ids=str)
def test_layers_that_are_alike(options: Options) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Constrained(4, 4) for _ in range(6)))
    eager, wrapped = copy.deepcopy(module), ORTModule(module, options)
    torch.testing.assert_close(_steps(wrapped, module, 4), _steps(eager, eager, 4))
    assert captures(wrapped) == 2, "in training and not"


def test_a_recurrent_layer_whose_weights_are_cut() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for parameter in self.lstm.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            return self.lstm(x.unsqueeze(1))[0].squeeze(1)

    torch.manual_seed(0)
    module = Cut()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    torch.testing.assert_close(_steps(wrapped, module, 4), _steps(eager, eager, 4))


def test_one_that_is_frozen_for_a_while_and_copied() -> None:
    torch.manual_seed(0)
    module = Net(_clamped)
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    for is_trained in (True, False, True):
        for net in (module, eager):
            net.linear.weight.requires_grad_(is_trained)
        torch.testing.assert_close(_steps(wrapped, module, 3), _steps(eager, eager, 3))
    other = copy.deepcopy(wrapped)
    torch.testing.assert_close(_steps(other, other.module, 3), _steps(eager, eager, 3))


def test_through_torch_compile() -> None:
    torch.manual_seed(0)
    module = Net(_clamped)
    eager, compiled = copy.deepcopy(module), torch.compile(module, backend="onnxtrain")
    torch.testing.assert_close(_steps(compiled, module, 4), _steps(eager, eager, 4))  # type: ignore[arg-type]


def test_one_that_is_no_parameter_of_the_module_is_refused() -> None:
    foreign = nn.Parameter(torch.ones(4))

    def change(m: Net, x: Tensor) -> None:
        foreign.data.mul_(0.5)
        x.add_(foreign)

    with pytest.raises(OnnxTrainError) as caught:
        ORTModule(Net(change))(torch.randn(3, 4))
    assert isinstance(caught.value, CaptureError) and caught.value.cure
    torch.testing.assert_close(foreign.data, torch.ones(4))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_shorten_their_rows(kind: type[nn.Module], norm: float, is_trained: bool) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = kind(6, 4, max_norm=0.7, norm_type=norm).requires_grad_(is_trained)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            ids = torch.arange(len(x)).view(-1, 1).repeat(1, 2) % 4
            return self.linear(x) * self.table(ids).view(len(x), -1, 4).sum(1)

    torch.manual_seed(0)
    module = Looked().double()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    torch.testing.assert_close(_steps(wrapped, module), _steps(eager, eager))


class Quantized(nn.Module):
    """Codes that are averages of what they are the nearest of: two parameters, set anew at each call in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.codes = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.sums = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        away = (y.unsqueeze(1) - self.codes.weight).square().sum(2)
        nearest = F.one_hot(away.argmin(1), 5).to(y.dtype)
        found = nearest @ self.codes.weight
        if self.training:
            self.counts = self.counts * 0.9 + 0.1 * nearest.sum(0)
            self.sums = nn.Parameter(self.sums * 0.9 + 0.1 * nearest.t() @ y)
            self.codes.weight = nn.Parameter(self.sums / self.counts.unsqueeze(1))
        return y + (found - y).detach() + F.mse_loss(found.detach(), y)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "reference"])
def test_parameters_that_are_set_anew(backend: str) -> None:
    """They are others after each call, as in eager; an optimizer has those of before."""
    torch.manual_seed(0)
    module = Quantized()
    eager, wrapped = copy.deepcopy(module), ORTModule(module, Options(backend=backend))
    before = module.sums
    torch.testing.assert_close(_steps(wrapped, module), _steps(eager, eager), rtol=1e-4, atol=1e-5)
    assert captures(wrapped) == 2, "in training and not"
    assert module.sums is not before and isinstance(module.sums, nn.Parameter) and module.sums.requires_grad


def test_a_parameter_that_is_set_anew_and_trained_then_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight * 0.9)  # the line
            return super().forward(x)

    wrapped = ORTModule(Scaled(4, 4))
    wrapped(torch.ones(3, 4)).sum().backward()
    before = wrapped.weight
    with pytest.raises(CaptureError, match="sets weight: a parameter, and trains it then, at every call") as caught:
        wrapped(torch.ones(3, 4))
    assert caught.value.source.startswith(__file__) and wrapped.weight is before


@pytest.mark.parametrize("trained", [("weight",), ("bias",), ("weight", "bias"), ()])
def test_a_list_of_which_some_are_trained_is_changed_whole(trained: tuple[str, ...]) -> None:
    def follow(m: Net, x: Tensor) -> None:
        with torch.no_grad():
            torch._foreach_mul_([m.linear.weight, m.linear.bias, m.done_as_float], 0.9)

    module = Net(follow)
    module.register_buffer("done_as_float", torch.ones(()))
    for name, parameter in module.linear.named_parameters():
        parameter.requires_grad_(name in trained)
    eager, wrapped = copy.deepcopy(module), ORTModule(module, Options(summary=False))
    for _ in range(3):
        x = torch.rand(3, 4)
        torch.testing.assert_close(wrapped(x), eager(x))
    torch.testing.assert_close(wrapped.state_dict(), eager.state_dict())
