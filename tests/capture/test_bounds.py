"""Values and gradients where a function has a corner: as eager PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import Calls

from onnxtrain import ORTModule

Tensor = torch.Tensor
CORNERS = torch.tensor([[0.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0], [2.0, -1.0, 1.0, 0.0]], dtype=torch.float64)
RANDOM = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp from below": lambda x: x.clamp(min=0),
    "clamp from above": lambda x: x.clamp_max(1.0),
    "clamp of integers": lambda x: x.long().clamp(0, 1) * x,
    "clamp of integers by numbers": lambda x: x.long().clamp(0.5, 1.5) * x,
    "clamp by tensors": lambda x: x.clamp(torch.zeros(4, dtype=x.dtype), x.detach().abs() + 0.0),
    "clamp by itself": lambda x: x.clamp(x.flip(0) - 1, x.flip(0)),
    "clamp by tensors that meet or cross": lambda x: x.clamp(x.flip(0) + 0.25, x.flip(1)) + x.clamp(-x.abs(), -x.abs()),
    "clamp by one tensor": lambda x: x.clamp(min=x.flip(0)) + x.clamp_max(x.flip(1)),
    "clamp by equal numbers": lambda x: x.clamp(1, 1) + 2 * x.clamp(0.0, 0.0),
    "clamp by crossed numbers": lambda x: x.clamp(1, -1) + x,
    "clamp by sizes": lambda x: x.clamp(-1, x.shape[0] - 1) + x.clamp_max(x.shape[0] - 2) + x.clamp(x.shape[1], 1),
    "fmax and fmin": lambda x: torch.fmax(x, x.flip(0)) + torch.fmin(x, x.flip(1)),
    "clamp by integers": lambda x: torch.clamp(x, torch.tensor(0), torch.tensor(1)),
    "hardtanh": F.hardtanh,
    "relu6": lambda x: F.relu6(6 * x),
    "logit": lambda x: torch.logit(x / 4 + 0.4, 0.2) + torch.logit(x.sigmoid()),
    "logit by crossed bounds": lambda x: torch.logit(x, 0.6) + x,
    "logit of integers": lambda x: torch.logit(x.long(), 0.3) * x,
    "log2": lambda x: torch.log2(x.abs() + 1),
    "log10": lambda x: torch.log10(x.abs() + 1),
    "log2 of integers": lambda x: torch.log2(x.abs().long() + 1) * x,
    "standard deviation": lambda x: x.std(1),
    "of a population": lambda x: x.std(0, unbiased=False, keepdim=True),
    "of all": lambda x: x.std() + (x * 0).std(correction=0),
    "of one element": lambda x: x[:1].std(0, unbiased=False) + x.sum(),
    "standard deviation and mean": lambda x: sum(torch.std_mean(x, 1)),
    "sinc": torch.sinc,
}


@pytest.mark.parametrize("given", [CORNERS, RANDOM], ids=["corners", "random"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_eager(name: str, given: Tensor) -> None:
    _compare(FUNCTIONS[name], given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_clamp_of_other_types(dtype: torch.dtype) -> None:
    """Bounds take the type of what they bound: no element is computed in another."""
    _compare(lambda x: x.to(dtype).clamp(-1, 1) * x.to(dtype).clamp(max=1) + x, CORNERS)


NONE = torch.nan
NUMBERS = torch.tensor([[1.0, NONE, -2.0, NONE], [0.5, 9.0, 1.0, NONE]])
BOUNDS = torch.tensor([[NONE, 0.0, 1.0, NONE], [2.0, NONE, 1.0, 1.0]])
NO_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp from below": lambda x: x.clamp(min=0),
    "clamp from above": lambda x: x.clamp(max=0.0),
    "the larger": lambda x: torch.maximum(x, BOUNDS),
    "the smaller": lambda x: torch.minimum(BOUNDS, x * 2),
    "a step": lambda x: torch.heaviside(x.detach(), BOUNDS) + 0 * x.nan_to_num(),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number(name: str) -> None:
    function = NO_NUMBERS[name]
    ours, eager = _step(ORTModule(Calls(function))), _step(function)
    torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.parametrize("clamp", [{"max": BOUNDS}, {"min": BOUNDS}, {"min": BOUNDS, "max": BOUNDS + 1}], ids=str)
def test_a_bound_that_is_no_number(clamp: dict[str, Tensor]) -> None:
    found = ORTModule(Calls(lambda x: x.clamp(**clamp)))(NUMBERS)
    torch.testing.assert_close(found, NUMBERS.clamp(**clamp), equal_nan=True)


def _step(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = NUMBERS.clone().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_saturated_probabilities(reduction: str) -> None:
    """A sigmoid of 40 is 1 in float32: the right label costs nothing, the wrong one 100."""
    target = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5])
    weight = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0])
    for given in (torch.tensor([40.0, -200.0, -200.0, 40.0, 0.3]).sigmoid(), torch.rand(5)):
        _compare(lambda x: F.binary_cross_entropy(x, target, reduction=reduction), given)
        _compare(lambda x: F.binary_cross_entropy(x, target, weight, reduction=reduction), given)


def _compare(function: Callable[[Tensor], Tensor], given: Tensor) -> None:
    results = []
    for module in (ORTModule(Calls(function)), Calls(function)):
        x = given.clone().requires_grad_()
        y = module(x)
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        results.append((y.detach(), x.grad))
    tolerance = 1e-10 if given.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
