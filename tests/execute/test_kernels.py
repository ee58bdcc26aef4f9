"""Kernels of ATen on what eager PyTorch never gives them, and where ONNX says less than ATen does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import Calls

from onnxtrain import ORTModule

Tensor = torch.Tensor


def compare(function: Callable[[Tensor], Tensor], given: Tensor) -> None:
    """Output and gradient in float64."""
    results = []
    for module in (ORTModule(Calls(function)), Calls(function)):
        x = given.clone().requires_grad_()
        y = module(x)
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_batch_normalization_without_weights_of_its_own() -> None:
    """Its scale is a 1 that was expanded: one element in memory."""
    compare(lambda x: F.batch_norm(x, None, None, training=True), torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("descending", [False, True])
def test_sorting_orders_equal_elements_as_eager_does(descending: bool) -> None:
    ties = torch.randint(0, 3, (2, 40), dtype=torch.float64)
    compare(lambda x: x.sort(-1, descending=descending)[1] * 0.5 + x, ties)
    compare(lambda x: x.sort(-1, descending=descending)[0], ties)
    compare(lambda x: torch.full_like(x, 3.0).argsort(-1, descending=descending) * 0.5 + x, ties)


@pytest.mark.parametrize(
    "function", [F.selu, lambda x: F.celu(x, 1.3), F.hardsigmoid], ids=["selu", "celu", "hardsigmoid"]
)
def test_numbers_of_an_activation_are_float64(function: Callable[[Tensor], Tensor]) -> None:
    compare(function, torch.randn(3, 4, dtype=torch.float64))


def test_attention_whose_heads_do_not_lie_in_one_piece() -> None:
    """Flash attention reads a row of a head as one piece."""

    def attend(x: Tensor) -> Tensor:
        hidden = torch.arange(7) < torch.tensor([[3], [1], [2]])
        q, k = (x + 0).exp(), x.view(3, 8, 7).mT
        q, k = (t[:, None].expand(3, 2, 7, 8) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, k, hidden[:, None, None])

    compare(attend, torch.randn(3, 7, 8, dtype=torch.float64))


BLIND = {
    "bool": lambda q, seen: seen,
    "float": lambda q, seen: torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf")),
}


@pytest.mark.parametrize("dropout", [0.0, 1e-300], ids=["fused", "written out"])
@pytest.mark.parametrize("kind", BLIND)
def test_a_query_that_sees_no_key_gets_zeros(kind: str, dropout: float) -> None:
    """Left padding makes such queries: their numbers, were they none, would spread to all others in the next layer."""
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[0, :, :, :2] = False

    def attend(x: Tensor) -> Tensor:
        for _ in range(2):
            q = x.cos()
            x = F.scaled_dot_product_attention(q, x, x, BLIND[kind](q, seen), dropout_p=dropout)
        return x

    compare(attend, torch.randn(2, 2, 5, 8, dtype=torch.float64))


AS_NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "median": lambda x: x[:1].expand(5, -1).contiguous().median(0).values,
    "nanmedian": lambda x: x.new_full((x.shape[0], 2), 3.0).nanmedian(0)[0] * x.sum(),
    "pairs, permuted": lambda x: torch.view_as_complex(torch.stack([x, x * 2], 0).permute(1, 2, 0).contiguous()).abs(),
    "pairs, filled": lambda x: torch.view_as_complex(torch.ones(x.shape[0], 2, dtype=x.dtype)).real * x[:, 0],
    "pairs that begin in the middle": lambda x: torch.view_as_complex(x.flatten()[1:5].clone().view(2, 2)).abs(),
    "other types of numbers": lambda x: torch.ones(x.shape[0], 2).view(torch.int16).double() * x,
}


@pytest.mark.parametrize("name", AS_NEW)
def test_what_is_new_in_eager_lies_as_if_it_were(name: str) -> None:
    """A graph expands, permutes and slices where eager PyTorch makes a copy."""
    compare(AS_NEW[name], torch.randn(3, 4, dtype=torch.float64))
