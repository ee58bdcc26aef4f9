"""Element types: float64 is exact, halves stay halves, and autocast reaches what is taken apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import pair, same_step

from onnxtrain import ORTModule

Tensor = torch.Tensor
LABELS = torch.ones(10, dtype=torch.long)


def _filled(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0.321
    return y


DOUBLE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + 0.1,
    "product": lambda x: x * (1 / 3),
    "difference": lambda x: 0.1 - x,
    "quotient": lambda x: 0.3 / (x + 3),
    "full": lambda x: x + torch.full((1,), 0.3, dtype=x.dtype),
    "new_full": lambda x: x + x.new_full((1,), 0.3),
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "power of a number": lambda x: 1.3**x,
    "power": lambda x: x.abs() ** 1.3,
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.123),
    "where": lambda x: torch.where(x > 0, x, 0.456),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0]), 0.123),
    "item assignment": _filled,
    "fill_": lambda x: torch.cat([x, torch.zeros_like(x).fill_(0.3)]),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.011),
    "elu": lambda x: F.elu(x, 1.1),
    "softplus": lambda x: F.softplus(x, 1.3, 0.5),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "huber": lambda x: F.huber_loss(x, x * 0, delta=0.3),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 0, beta=0.3),
    "l1 of two types": lambda x: F.l1_loss(x.bfloat16(), x),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.1),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "linspace": lambda x: x * torch.linspace(0, 0.3, 4, dtype=x.dtype),
    "arange": lambda x: x * torch.arange(0, 0.4, 0.1, dtype=x.dtype),
    "fmod": lambda x: x.fmod(0.3),
    "remainder": lambda x: x.remainder(0.3),
    "xlogy": lambda x: torch.xlogy(0.3, x.abs()),
    "label smoothing": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.ones(10, dtype=torch.long), label_smoothing=0.1
    ),
    "einsum of two types": lambda x: torch.einsum("bi,bj->bij", x[..., 0], x[..., 1].float()),
    "interpolate": lambda x: F.interpolate(x.mT, size=7, mode="linear"),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.3),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "ndtr": torch.special.ndtr,
    "deg2rad": torch.deg2rad,
}
AUTOCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("blc,cd->bld", x, w),
    "einsum of a product": lambda x, w: torch.einsum("blc,bmc->blm", x @ w, x),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "bilinear": lambda x, w: F.bilinear(x, x, w[None]),
    "inner": torch.inner,
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x[0], w, w]),
    "mv": lambda x, w: torch.mv(w, x[0, 0]),
    "dot": lambda x, w: w[0].dot(x[0, 0]),
    "nll_loss": lambda x, w: F.nll_loss((x @ w).log_softmax(-1).flatten(0, 1), LABELS),
}
ANY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, w: (x @ w).sum(),
    "sum of an axis": lambda x, w: (x @ w).sum(1),
    "sum in float32": lambda x, w: (x @ w).sum(dtype=torch.float32),
    "mean": lambda x, w: (x @ w).mean(),
    "cumsum": lambda x, w: (x @ w).cumsum(1),
    "prod": lambda x, w: (x @ w).prod(1),
    "mse_loss": lambda x, w: F.mse_loss(x @ w, x),
    "var": lambda x, w: (x @ w).var(1),
    "topk": lambda x, w: (x @ w).topk(2).values,
    "sort": lambda x, w: (x @ w).sort().values,
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "number": lambda x, w: (x @ w) * 2.5,
    "integers": lambda x, w: (x @ w) + torch.arange(4),
    "float32": lambda x, w: (x @ w) * torch.ones(4),
    "cat": lambda x, w: torch.cat([x @ w, x.float()], 1),
}


class Weighted(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor], weight: Tensor) -> None:
        super().__init__()
        self.weight, self._function = torch.nn.Parameter(weight), function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.weight)


def _compare(function: Callable[..., Tensor], x: Tensor, weight: Tensor, close: dict[str, Any], autocast: bool) -> None:
    module = Weighted(function, weight)
    eager, found = copy.deepcopy(module), []
    for model in (ORTModule(module), eager):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found.append(model(x))
        found[-1].sum().backward()
    torch.testing.assert_close(*found, **close)
    torch.testing.assert_close(module.weight.grad, eager.weight.grad, **close)


@pytest.mark.parametrize("name", DOUBLE)
def test_numbers_are_as_exact_as_the_tensors_they_meet(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    weight = torch.rand(4, dtype=torch.float64) + 0.5
    _compare(lambda x, w: DOUBLE[name](x * w), x, weight, {"rtol": 1e-12, "atol": 1e-13}, False)


DEFAULT: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda x: x * torch.full((x.shape[0], 1), 0.1),
    "ones": lambda x: x + torch.ones(x.shape[0], 1) * 0.1,
    "zeros": lambda x: x * (torch.zeros(4) + 0.1),
    "arange": lambda x: x + torch.arange(0.1, 4),
    "linspace": lambda x: x + torch.linspace(0.1, 0.9, x.shape[1]),
    "scalar tensor": lambda x: x * torch.scalar_tensor(0.1),
    "window": lambda x: x * torch.hann_window(4),
    "normal": lambda x: x * torch.normal(0.1, 0.2, (4,)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((4,), 0.8)),
    "integers with a number": lambda x: x + torch.arange(4) * 0.1 + torch.arange(4) ** 0.1 + 10.0 ** torch.arange(4),
    "quotients of integers": lambda x: x + torch.arange(4) / 7 + torch.arange(4) // 0.1,
    "functions of integers": lambda x: x + torch.arange(4).erf() + torch.arange(1, 5).sqrt() + torch.arange(4).exp(),
    "truth with a number": lambda x: x + (x > 0) * 0.1,
}


@pytest.mark.parametrize("name", DEFAULT)
def test_the_default_type_is_the_users(name: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        eager = Weighted(lambda x, w: DEFAULT[name](x * w), torch.rand(4) + 0.5)
        wrapped, found = ORTModule(copy.deepcopy(eager)), []
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            for model in (wrapped, eager):
                torch.manual_seed(1)
                found.append(model(x))
                found[-1].sum().backward()
            assert found[-2].dtype == found[-1].dtype == torch.float64
            torch.testing.assert_close(*found[-2:], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-12, atol=1e-13)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ANY)
def test_halves_stay_halves(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4).to(dtype), torch.randn(4, 4).to(dtype)
    _compare(ANY[name], x, weight, {"rtol": 0.03, "atol": 0.05}, False)


@pytest.mark.parametrize("name", [*ANY, *AUTOCAST])
def test_autocast_gives_the_types_that_it_gives_in_eager(name: str) -> None:
    torch.manual_seed(0)
    function = (ANY | AUTOCAST)[name]
    _compare(function, torch.randn(2, 5, 4), torch.randn(4, 4), {"rtol": 0.05, "atol": 0.06}, True)


class WritesAtShortPlaces(torch.nn.Module):
    """Places of a shorter type than ONNX has them, in what is a second derivative."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        second = torch.func.hessian(lambda a: a.pow(3).sum() * a.mean())(x.flatten()[:3]).clone()
        second[places] = 3.0
        return second * x.sum()


def test_places_of_a_shorter_type() -> None:
    wrapped, eager = pair(WritesAtShortPlaces())
    places = torch.tensor([[0, 2]], dtype=torch.int32)
    for size in (2, 3):
        same_step(wrapped, eager, torch.randn(size, 4, requires_grad=True), places)


class Taught(torch.nn.Module):
    """A student and a teacher that is not trained, each with casts of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def _autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _distilled(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.teacher(x)
    return ((m.student(x) - target) ** 2).mean()


def _running_mean(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.5).add_(m.student(x).mean(0))
    return m.student(x) - m.mean


def _exact_within(m: Any, x: Tensor) -> Tensor:
    with _autocast(False):
        y = m.student(x)
        with torch.no_grad():
            codes = m.teacher(x)
        return m.student(y) + codes


def _gradients_within(m: Any, x: Tensor) -> Tensor:
    with _autocast(), torch.no_grad():
        with _autocast(False):
            codes = m.teacher(x)
            with torch.enable_grad():
                y = m.student(x)
        rest = m.teacher(x)
    return y * codes * rest


REGIONS = {f.__name__.strip("_"): f for f in (_distilled, _running_mean, _exact_within, _gradients_within)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", REGIONS)
def test_regions_without_gradients_and_without_casts(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    wrapped, eager = pair(Taught(REGIONS[name]))
    for rows in (3, 5):
        x, results = torch.randn(rows, 4), []
        for module in (wrapped, eager):
            module.zero_grad()
            with _autocast(autocast):
                results.append(module(x))
            results[-1].float().sum().backward()
        assert results[0].dtype == results[1].dtype
        torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
        for (label, made), (_, expected) in zip(wrapped.named_parameters(), eager.named_parameters(), strict=True):
            assert (made.grad is None) == (expected.grad is None), label
            if expected.grad is not None:
                torch.testing.assert_close(made.grad, expected.grad, rtol=0.03, atol=0.03)
        torch.testing.assert_close(wrapped.mean, eager.mean, rtol=0.02, atol=0.02)


def test_a_region_without_casts_is_exact() -> None:
    torch.manual_seed(0)
    wrapped, eager = pair(Taught(_exact_within))
    x = torch.randn(5, 4)
    with _autocast():
        torch.testing.assert_close(wrapped(x), eager(x), rtol=1e-6, atol=1e-6)
