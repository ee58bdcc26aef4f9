"""Batch normalization: layers that are called twice, means over all batches, several outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Calls, captures, pair, same, same_step

from onnxtrain import Options, ORTModule
from onnxtrain.capture.lowering import Lowering
from onnxtrain.capture.lowering.writer import values


class Twice(torch.nn.Module):
    """A siamese network: both inputs go through one layer."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(a)) - self.norm(self.linear(b))).square().mean()


class Once(Twice):
    """The loss is not the first scalar that is returned."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.linear(a + b))
        return h.detach().mean(), h.square().mean() + h.mean()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [Twice, Once])
def test_statistics_as_eager(kind: type[Twice], momentum: float | None) -> None:
    wrapped, eager = pair(kind(momentum))
    for step in range(3):
        same_step(wrapped, eager, torch.randn(3 + step, 4), torch.randn(3 + step, 4))
        same(dict(wrapped.named_buffers()), dict(eager.named_buffers()))
    assert captures(wrapped) == 1
    wrapped.eval()
    eager.eval()
    same_step(wrapped, eager, torch.randn(3, 4), torch.randn(3, 4))


EMPTY = {
    "one layer": lambda: torch.nn.BatchNorm1d(3),
    "twice": lambda: torch.nn.Sequential(*[torch.nn.BatchNorm1d(3)] * 2),
    "a mean over all batches": lambda: torch.nn.BatchNorm1d(3, momentum=None),
    "no running statistics": lambda: torch.nn.BatchNorm1d(3, track_running_stats=False),
    "of each sample": lambda: torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
}


class Beyond(torch.nn.Module):
    """Normalizes what comes after the second place, which may be nothing."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x[..., 2:]), x.square().sum()


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_leaves_the_statistics_as_they_were(name: str) -> None:
    wrapped, eager = pair(Beyond(EMPTY[name]()))
    for size in ((2, 3, 5), (2, 3, 2), (4, 3, 6)):
        same_step(wrapped, eager, torch.randn(size))
        same(dict(wrapped.named_buffers()), dict(eager.named_buffers()))


def test_an_empty_row_has_no_channels_to_normalize() -> None:
    class Row(torch.nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            given = (self.running_mean, self.running_var, self.weight, self.bias, self.training)
            return torch.nn.functional.batch_norm(x.flatten()[:0], *given), x.square().sum()

    wrapped, eager = pair(Row(4))
    same_step(wrapped, eager, torch.randn(2, 3))
    same(dict(wrapped.named_buffers()), dict(eager.named_buffers()))


class Without(Beyond):
    """Normalizes channels that are not there."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x[:, 6:]), x.square().sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_channels_are_normalized_whatever_their_number(momentum: float | None, training: bool) -> None:
    wrapped, eager = (m.train(training) for m in pair(Without(torch.nn.BatchNorm2d(4, momentum=momentum))))
    for batch in (2, 3):
        same_step(wrapped, eager, torch.randn(batch, 3, 2, 5))
        same(dict(wrapped.named_buffers()), dict(eager.named_buffers()))


class Transposed(torch.nn.Module):
    """Channels come last, and a copy of the result is written to."""

    def __init__(self, dims: int, **options: Any) -> None:
        super().__init__()
        self.norm = (torch.nn.BatchNorm1d if dims == 3 else torch.nn.BatchNorm2d)(4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result as it was before its copy was written to."""
        y = self.norm(x.transpose(1, -1)).transpose(1, -1)
        copied = y.flatten()
        copied.add_(-2)
        return y


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}])
@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 5, 2, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_an_input_of_another_order_in_memory(options: dict[str, Any], shape: tuple[int, ...], training: bool) -> None:
    """What is a copy in eager is one in the graph: the result has an order of its own."""
    wrapped, eager = pair(Transposed(len(shape), **options).double().train(training))
    for _ in range(2):
        same_step(wrapped, eager, torch.randn(shape, dtype=torch.float64))


class OfOneSample(torch.nn.Module):
    """What ATen's kernel gets wrong where one sample lies in another order than its gradient."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3).double(), norm.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.permute(0, 3, 1, 2)))


@pytest.mark.parametrize("norm", [torch.nn.InstanceNorm2d(4), torch.nn.BatchNorm2d(4)])
def test_one_sample_has_its_gradient_in_any_order(norm: torch.nn.Module) -> None:
    """By differences: that of eager PyTorch's own kernel is wrong for some orders."""
    wrapped = ORTModule(OfOneSample(norm), options=Options(summary=False))
    x, factors = torch.randn(1, 6, 6, 3).double(), torch.randn(1, 4, 4, 4).double()
    weight = wrapped.conv.weight
    (wrapped(x) * factors).sum().backward()
    step = torch.zeros_like(weight).normal_() * 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step
            values.append((wrapped(x) * factors).sum())
            weight -= sign * step
    torch.testing.assert_close((weight.grad * step).sum(), (values[0] - values[1]) / 2, rtol=1e-5, atol=1e-12)


class Tells(torch.nn.Module):
    """Returns what it has gathered, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        return (y - self.norm.running_mean).sin(), self.norm.running_mean, self.norm.running_var[None]


def test_statistics_that_are_read_have_no_gradient() -> None:
    wrapped, eager = pair(Tells())
    for rows in (3, 5):
        ours, theirs = same_step(wrapped, eager, torch.randn(rows, 4, requires_grad=True))
        assert [y.requires_grad for y in ours] == [y.requires_grad for y in theirs] == [True, False, False]


_TYPES = [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("sizes", [(), (3,), (3, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize(("dtype", "of_statistics"), _TYPES, ids=str)
def test_what_a_call_returns_is_stated_as_torch_finds_it(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], dtype: torch.dtype, of_statistics: torch.dtype
) -> None:
    found = []

    def both(self: Lowering, target: Any, given: Any, recorded: torch.Tensor) -> Any:
        told = stated(self, target, given, recorded)
        found.append((told, self._writer.result(target, values(given), {})))
        return told

    stated = Lowering._normalized
    monkeypatch.setattr(Lowering, "_normalized", both)
    kind = (torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[len(sizes)]
    ORTModule(kind(4).to(of_statistics))(torch.randn(5, 4, *sizes, dtype=dtype))
    for told, apart in found:
        for ours, torchs in zip(told, apart, strict=True):
            assert (ours.shape, ours.dtype, ours.device) == (torchs.shape, torchs.dtype, torchs.device)
    assert found


class Looking(torch.nn.Module):
    """Gives its running mean, as the batch changed it."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.norm, self.again = torch.nn.BatchNorm1d(3), again

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.norm(x)) if self.again else self.norm(x)
        return y, self.norm.running_mean.clone()


@pytest.mark.parametrize("again", [False, True])
def test_new_running_statistics_have_no_gradient(again: bool) -> None:
    wrapped, eager = pair(Looking(again))
    x = torch.randn(5, 3)
    compiled = torch.compile(pair(eager)[1], backend="onnxtrain")
    expected = eager(x)
    for found in (wrapped(x), compiled(x)):
        torch.testing.assert_close(found, expected)
        assert [y.requires_grad for y in found] == [True, False]


GIVEN: dict[str, Callable[..., Any]] = {
    "functional": lambda x, w, mean, var: F.batch_norm(x, mean, var, w, None, True, 0.3),
    "named": lambda x, w, mean, var: F.batch_norm(x, running_var=var, running_mean=mean, weight=w, training=True),
    "evaluated": lambda x, w, mean, var: F.batch_norm(x, mean, var, w),
    "twice": lambda x, w, mean, var: F.batch_norm(F.batch_norm(x, mean, var, w, None, True), mean, var, w, None, True),
    "batch_norm": lambda x, w, mean, var: torch.batch_norm(x, w, None, mean, var, True, 0.3, 1e-5, False),
    "native": lambda x, w, mean, var: torch.native_batch_norm(x, w, w * 2, mean, var, True, 0.3, 1e-5),
    "native evaluated": lambda x, w, mean, var: torch.native_batch_norm(x, w, None, mean, var, False, 0.3, 1e-5),
    "instances": lambda x, w, mean, var: F.instance_norm(x, mean, var, w),
    "instance_norm": lambda x, w, mean, var: torch.instance_norm(x, w, None, mean, var, True, 0.3, 1e-5, False),
}


@pytest.mark.parametrize("name", GIVEN)
def test_running_statistics_that_are_given_in_the_call(name: str) -> None:
    """They are the caller's, who finds them moved."""
    wrapped, eager = pair(Calls(GIVEN[name]))
    for batch in (4, 3, 6):
        x, w = torch.randn(batch, 3, 5, dtype=torch.float64), torch.rand(3, dtype=torch.float64, requires_grad=True)
        found = []
        for run in (wrapped, eager):
            statistics = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
            made = run(x, w, *statistics)
            made = made if isinstance(made, tuple) else (made,)
            (gradient,) = torch.autograd.grad(made[0].square().sum(), w)
            found.append((made, statistics, gradient, [y.requires_grad for y in made]))
        torch.testing.assert_close(*found)
