"""Where there is no number, an infinite one or a zero with a sign: values and gradients are eager's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from parity import Calls, pair

Tensor = torch.Tensor
ENDS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-38, 1e38, -3.5, -1.0, 1.0, 2.5)
EXPONENTS = (0.5, -0.5, 1.5, 0.25, 2, 3, 1, 0, -1, -2, -3, math.nan, math.inf)
ROUNDED = {
    "trunc": torch.trunc,
    "fix": torch.fix,
    "frac": torch.frac,
    "round": torch.round,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "sign": torch.sign,
    "divided by 2": lambda x: torch.div(x, 2, rounding_mode="trunc"),
    "divided by -1": lambda x: torch.div(x, -1, rounding_mode="trunc"),
    "divided down": lambda x: torch.div(x, 0.5, rounding_mode="floor"),
    "logarithm of a number": lambda x: torch.xlogy(x, 1e-40),
    "remainder of 2": lambda x: x % 2,
    "logarithm of a sigmoid": torch.nn.functional.logsigmoid,
    "Huber's loss": lambda x: torch.nn.functional.huber_loss(x, torch.ones_like(x), reduction="none", delta=0.5),
}
OF_TWO = {
    "divided": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "divided down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "power": torch.pow,
    "sign of another": torch.copysign,
}
OF_ONE = {
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "max": lambda x: x.max(1).values,
    "max of all": lambda x: x.max(),
    "amax of all": lambda x: x.amax(),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumprod": lambda x: x.cumprod(1),
}
ADDED = {
    "addmm": lambda x, a, b, beta: torch.addmm(x[0], a[0], b[0], beta=beta, alpha=2),
    "baddbmm": lambda x, a, b, beta: torch.baddbmm(x, a, b, beta=beta, alpha=2),
    "addbmm": lambda x, a, b, beta: torch.addbmm(x[0], a, b, beta=beta),
    "addmv": lambda x, a, b, beta: torch.addmv(x[0, 0], a[0], b[0, :, 0], beta=beta),
    "addr": lambda x, a, b, beta: torch.addr(x[0], a[0, 0], b[0, 0], beta=beta),
}


def _same(function: Callable[..., Tensor], *operands: Tensor) -> None:
    """Of one function, in ORTModule and in eager PyTorch: values and gradients, with the signs of zeros of values."""
    found = []
    for module in pair(Calls(function)):
        given = [x.clone().requires_grad_() for x in operands]
        result = module(*given)
        slopes = torch.autograd.grad(result, given, torch.ones_like(result), allow_unused=True)
        found.append((result, [torch.zeros_like(x) if s is None else s for x, s in zip(given, slopes, strict=True)]))
    (ours, our_slopes), (theirs, slopes) = found
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    is_number = ~theirs.isnan()
    assert torch.equal(ours.signbit()[is_number], theirs.signbit()[is_number])
    for one, other in zip(our_slopes, slopes, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_powers(exponent: float, dtype: torch.dtype) -> None:
    """Torch takes the root for the exponent 0.5, whose sign and gradient at ends are not those of a power."""
    _same(lambda x: x**exponent, torch.tensor(ENDS, dtype=dtype))


@pytest.mark.parametrize("name", ROUNDED)
def test_signs_of_zeros(name: str) -> None:
    _same(ROUNDED[name], torch.tensor(ENDS))


@pytest.mark.parametrize("name", OF_TWO)
def test_of_two(name: str) -> None:
    x, y = torch.tensor(list(itertools.product(ENDS, ENDS))).T.contiguous()
    _same(OF_TWO[name], x, y)


def test_gradient_of_a_product_with_a_logarithm_of_a_number() -> None:
    _same(lambda x: torch.xlogy(x, 2), torch.zeros(3))


@pytest.mark.parametrize("name", OF_ONE)
def test_reductions_of_one_element(name: str) -> None:
    _same(OF_ONE[name], torch.tensor(ENDS)[:, None])


def test_a_norm_of_one_element_whose_square_is_infinite() -> None:
    _same(lambda x: torch.linalg.vector_norm(x, dim=1), torch.tensor([[1e38], [1e-38], [-2.0], [torch.nan]]))


@pytest.mark.parametrize("beta", [0, 0.5])
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_no_times(name: str, beta: float) -> None:
    """With a beta of 0 it is ignored, even where it is no number."""
    x = torch.full((2, 3, 3), torch.nan if beta == 0 else 1.5)
    _same(lambda *given: ADDED[name](*given, beta), x, torch.randn(2, 3, 3), torch.randn(2, 3, 3))
