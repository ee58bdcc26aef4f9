"""Largest elements, truth of all and any, spreads, angles: where elements tie, and where there are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, Calls, captures, pair, same_step
from torch.torch_version import TorchVersion

from onnxtrain.errors import OnnxTrainError

Tensor = torch.Tensor
TIED = {
    "max": lambda x: x.max(1).values,
    "min kept": lambda x: x.min(-1, keepdim=True).values,
    "max of all": lambda x: x.max(),
    "amax": lambda x: x.amax(1),
    "amin of two": lambda x: x.amin((0, 1)),
    "max with its places": lambda x: x.max(0)[0] * (1 + x.max(0)[1]),
    "of a number": lambda x: x.sum().max(0).values,
    "median": lambda x: x.median(1).values,
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
}
EMPTY = {
    "all": lambda x: x.sum() + (x > 9).all(),
    "any": lambda x: x.sum() + (x > 9).any(),
    "all of an axis": lambda x: x.sum() + (x > 9).all(1).sum(),
    "any kept": lambda x: x.sum() + (x > 9).any(-1, keepdim=True).sum(),
    "amax of another axis": lambda x: x.amax(-1),
}
FLAT = {
    "deviation": lambda x: x.std(0),
    "deviation of all": lambda x: x.std(),
    "deviation and mean": lambda x: torch.std_mean(x, 1)[0],
}
HIDDEN = {
    "filled": lambda b, shown: b.masked_fill(~shown, -torch.inf),
    "chosen": lambda b, shown: torch.where(shown, b, -torch.inf),
    "added": lambda b, shown: b + torch.zeros(shown.shape).masked_fill(~shown, -torch.inf),
    "added twice": lambda b, shown: b + torch.ones(5, 5).tril().log() + shown.flip(-1).float().log(),
    "written": lambda b, shown: (b + torch.zeros_like(shown, dtype=b.dtype)).index_put(
        (~shown,), torch.tensor(-torch.inf)
    ),
    "in another type": lambda b, shown: b.half().masked_fill(~shown, -torch.inf).float(),
    "all or nothing": lambda b, shown: b.masked_fill(shown.any(), -torch.inf),
}
STEEP = {"root": lambda y: (y * y).sqrt(), "logarithm": lambda y: y.abs().log(), "as it is": lambda y: y}


@pytest.mark.parametrize("name", TIED)
def test_ties_have_the_gradient_of_eager(name: str) -> None:
    x = torch.tensor([[1.0, 3, 3, 2], [2, 2, 1, 1], [3, 3, 3, 3]], requires_grad=True)
    same_step(*pair(Applied(TIED[name])), x)


@pytest.mark.parametrize("name", EMPTY)
def test_reductions_of_nothing(name: str) -> None:
    wrapped, eager = pair(Applied(EMPTY[name]))
    for length in (3, 0, 2):
        same_step(wrapped, eager, torch.randn(2, length, 4))
    assert captures(wrapped) <= 2


@pytest.mark.parametrize("outside", STEEP)
@pytest.mark.parametrize("name", FLAT)
def test_no_gradient_where_there_is_no_spread(name: str, outside: str) -> None:
    """Not even where what comes back is infinite."""
    wrapped, eager = pair(Applied(lambda x: STEEP[outside](FLAT[name](x))).double())
    for x in (torch.zeros(3, 4), torch.ones(3, 4), torch.tensor([[0.0, 1, 2, -1], [0, 1, 0, 0], [0, 1, -3, 1]])):
        same_step(wrapped, eager, x.double().requires_grad_())


FAR = {
    "times a logarithm": lambda x: torch.xlogy(x.relu(), x.abs() + 0.5) + torch.special.xlog1py(x.relu(), x.sigmoid()),
    "remainder": lambda x: x % 6.2831 + torch.remainder(x, -0.3),
    "log of a sigmoid": torch.nn.functional.logsigmoid,
    "log of a sum": lambda x: torch.logaddexp(x, -x) + torch.logaddexp(x, x.detach()),
    "by powers of 2": lambda x: torch.logaddexp2(x, 1 - x),
    "running log of a sum": lambda x: x.unsqueeze(1).mul(torch.tensor([1.0, -1, 0.5])).logcumsumexp(1),
    "scaled error function": lambda x: torch.special.erfcx(x.abs()),
    "labels": lambda x: torch.nn.functional.multilabel_soft_margin_loss(
        x.unsqueeze(1), torch.ones(len(x), 1), reduction="none"
    ),
}


@pytest.mark.parametrize("name", FAR)
def test_what_is_finite_where_an_exponential_is_not(name: str) -> None:
    x = torch.tensor([0.0, 1, -1, 20, -20, 50, -50, 90, -90, 104, -104, 1e3, -1e3, 1e10, -1e10])
    same_step(*pair(Applied(FAR[name])), x.requires_grad_())


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("function", [torch.log1p, torch.expm1, torch.erfc])
def test_digits_of_small_results(function: Callable[[Tensor], Tensor], backend: str) -> None:
    wrapped, eager = pair(Applied(function), backend=backend)
    x = torch.tensor([1e-9, -1e-9, 1e-30, 0.0, 1e-4, 0.3, -0.3, 0.7, 3.0, 9.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(wrapped(x), eager(x), rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("turn", [lambda x: x.detach(), lambda x: x.flip(0), lambda x: -x])
def test_no_gradient_where_there_is_no_angle(turn: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[0.0, 1, 2, -1], [0, 1, 0, 0], [0, 1, -3, 1]], requires_grad=True)
    same_step(*pair(Applied(lambda x: torch.atan2(x, turn(x)))), x)


def test_angles_of_all_quadrants() -> None:
    ends = torch.tensor([0.0, -0.0, 1, -2, torch.inf, -torch.inf, torch.nan])
    y, x = torch.meshgrid(ends, ends, indexing="ij")
    wrapped, eager = pair(Applied(lambda both: torch.atan2(both[0], both[1])))
    both = torch.stack([y, x])
    torch.testing.assert_close(wrapped(both), eager(both), equal_nan=True)


@pytest.mark.parametrize(
    ("layer", "least"), [(torch.nn.ConvTranspose2d(2, 2, 2, stride=2), 0), (torch.nn.Conv2d(2, 3, 2), 2)]
)
def test_convolutions_of_nothing(layer: torch.nn.Module, least: int) -> None:
    wrapped, eager = pair(layer)
    for batch, length in ((0, least), (2, 3), (0, 3)):
        same_step(wrapped, eager, torch.randn(batch, 2, length, 4))


def test_groups_of_nothing() -> None:
    """Eager PyTorch has no number for the gradient of the weight of empty groups; here it is 0."""
    wrapped, eager = pair(torch.nn.GroupNorm(1, 2))
    for batch, length in ((2, 3), (0, 3)):
        same_step(wrapped, eager, torch.randn(batch, 2, length, 4))
    try:
        eager(torch.randn(2, 2, 0, 4))
    except RuntimeError as error:  # from torch 2.15 on
        with pytest.raises(OnnxTrainError, match=str(error)):
            wrapped(torch.randn(2, 2, 0, 4))
    else:
        same_step(wrapped, eager, torch.randn(0, 2, 0, 4))
        assert wrapped(torch.randn(2, 2, 0, 4)).shape == (2, 2, 0, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.fold(torch.nn.functional.unfold(x, 2), x.shape[2:], 2),
        lambda x: torch.nn.functional.max_pool2d(x, 2),
        lambda x: torch.nn.functional.avg_pool2d(x, 2),
        lambda x: torch.nn.functional.local_response_norm(x, 2),
        lambda x: x.flatten(1),
        lambda x: x[:, :, 4:].var(1, keepdim=True, unbiased=False),
    ],
    ids=["fold", "max pooling", "average pooling", "neighbours", "flat", "spread"],
)
def test_images_of_nothing(function: Callable[[Tensor], Tensor]) -> None:
    wrapped, eager = pair(Applied(function))
    for batch in (0, 2, 1, 0):
        same_step(wrapped, eager, torch.randn(batch, 3, 4, 4, requires_grad=True))


class Product(torch.nn.Module):
    """A batch of matrices and one matrix."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y @ x.mT


def test_products_of_nothing() -> None:
    wrapped, eager = pair(Product())
    for size in (3, 0, 2):
        same_step(wrapped, eager, torch.randn(size, 4, requires_grad=True), torch.randn(size, 5, 4))


class LastThird(torch.nn.Module):
    """Attention to some of the sequences, which are none where there are fewer than three."""

    def forward(self, x: Tensor) -> Tensor:
        some = x.tensor_split(3)[-1]
        return F.scaled_dot_product_attention(x, some, some)


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="eager PyTorch has no such attention")
def test_attention_to_no_sequence() -> None:
    wrapped, eager = pair(LastThird())
    for batch in (3, 2, 1, 0):
        same_step(wrapped, eager, torch.randn(batch, 5, 4, requires_grad=True))


class Biased(torch.nn.Module):
    """Attention with a learned bias, or the scores of another, under a mask."""

    def __init__(self, hide: Callable[[Tensor, Tensor], Tensor], frozen: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(2, 5, 5), requires_grad=not frozen)
        self.hide, self.dropout = hide, dropout

    def forward(self, q: Tensor, keep: Tensor) -> Tensor:
        shown = (keep[:, None, :, None] & keep[:, None, None, :]).expand(-1, 2, -1, -1)
        bias = self.bias + q @ q.mT if self.dropout else self.bias
        return F.scaled_dot_product_attention(q, q, q, self.hide(bias, shown), self.dropout)


KEEP = torch.arange(5)[None] < torch.tensor([[5], [3], [4]])


@pytest.mark.parametrize("settings", [{}, {"frozen": True}, {"dropout": 0.25}], ids=str)
@pytest.mark.parametrize("hide", HIDDEN)
def test_a_query_that_sees_no_key_beside_a_learned_bias(hide: str, settings: dict[str, float]) -> None:
    wrapped, eager = pair(Biased(HIDDEN[hide], **settings))
    q = torch.randn(3, 2, 5, 4, requires_grad=True)
    outputs = []
    for module in (wrapped, eager):
        torch.manual_seed(0)
        outputs.append(module(q, KEEP))
    torch.testing.assert_close(*outputs)
    assert outputs[0].isfinite().all()
    if not settings.get("dropout"):
        same_step(wrapped, eager, q, KEEP)


def test_a_query_that_sees_no_key_by_a_mask_that_is_given() -> None:
    attend = pair(Calls(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask)))
    mask = torch.zeros(3, 1, 5, 5).masked_fill(~KEEP[:, None, :, None], -torch.inf)
    same_step(*attend, torch.randn(3, 2, 5, 4, requires_grad=True), mask)


def test_a_bias_that_hides_no_key_costs_nothing() -> None:
    """Penalties of finite numbers hide nothing altogether."""

    def penalized(bias: Tensor, shown: Tensor) -> Tensor:
        return bias + (1.0 - shown.float()) * torch.finfo(torch.float32).min

    wrapped, eager = pair(Biased(penalized))
    same_step(wrapped, eager, torch.randn(3, 2, 5, 4, requires_grad=True), KEEP)
    assert "Where" not in wrapped.graph("captured") and "ReduceMax" not in wrapped.graph("captured")


def test_an_output_without_gradient_whose_derivative_is_infinite():
    """An entropy that nobody uses, of probabilities that are 0, is no part of the gradients."""

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            p = torch.softmax(self.layer(x) * 1e4, -1)
            return p, -(p * p.log()).sum(-1), p.sin()

    ours, eager = pair(Policy().double())
    for used in (0, 2, 0):  # by the last one, two outputs are expected to receive gradients
        x = torch.randn(4, 3, dtype=torch.float64)
        for module in (ours, eager):
            module.zero_grad()
            module(x)[used].square().sum().backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.isfinite(other.grad).all()
            assert torch.equal(one.grad, other.grad)
