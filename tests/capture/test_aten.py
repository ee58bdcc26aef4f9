"""Operators that stay whole as ATen nodes: which, and that they run and are differentiated as torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


def compare(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> ORTModule:
    """Outputs and gradients as eager has them, from the same random state; gives the wrapped module."""
    wrapped, results = ORTModule(Calls(function)), []
    for module in (wrapped, Calls(function)):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        torch.manual_seed(3)
        y = module(*leaves)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(x.grad for x in leaves if x.requires_grad)])
    torch.testing.assert_close(results[0], results[1])
    return wrapped


FUNCTIONS = {
    "complex numbers": lambda x: torch.fft.fft(x).abs().sum(),
    "a list of results": lambda x: sum(p.prod() for p in torch.hsplit(x, 2)),
    "integer results": lambda x: torch.kthvalue(x, 2)[0].sum(),
    "a computed number": lambda x: torch.cumprod(x, 0).narrow(0, 0, x.shape[0] - 1).sum(),
    "written in place": lambda x: x.clone().cumprod_(0).sum(),
    "no dimensions": lambda x: torch.special.i1e(x.sum()),
    "an optional tensor": lambda x: torch.trapezoid(x.logcumsumexp(1), x.cummax(1)[0]).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_eager(name: str) -> None:
    compare(FUNCTIONS[name], torch.rand(4, 6) + 0.5)


def test_random_numbers_are_drawn_once() -> None:
    wrapped = compare(lambda x: F.rrelu(x, 0.0, 1.0, True), torch.randn(64))
    assert "aten::rrelu" in wrapped.graph("captured")


def test_no_rule_keeps_the_operator_whole() -> None:
    wrapped = compare(lambda x: torch.cumprod(x, 0), torch.rand(3, 4))
    assert "aten::cumprod" in wrapped.graph("captured")


def test_squeeze_of_one_and_of_more() -> None:
    wrapped, eager = ORTModule(Calls(torch.squeeze)), Calls(torch.squeeze)
    for rows in (1, 3, 1):
        x = torch.randn(rows, 4, requires_grad=True)
        assert wrapped(x).shape == eager(x).shape


def test_a_size_of_one_that_must_stay_one() -> None:
    compare(lambda a, b: torch.block_diag(a, b).square().sum(), torch.rand(1, 2), torch.rand(3, 1))


def test_running_statistics_that_would_be_lost_are_refused() -> None:
    with pytest.raises(CaptureError, match="instance_norm updates running statistics"):
        ORTModule(torch.nn.InstanceNorm1d(3, track_running_stats=True))(torch.randn(2, 3, 4))
