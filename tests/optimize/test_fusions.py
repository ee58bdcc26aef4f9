"""Formulas that models write out become one operator, and only those."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, pair, same_step

from onnxtrain import ORTModule


class WrittenOut(torch.nn.Module):
    """Gelu's tanh approximation as GPT-2 writes it, with one of its constants to choose."""

    def __init__(self, cubic: float) -> None:
        super().__init__()
        self.linear, self.cubic = torch.nn.Linear(4, 6), cubic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        inner = math.sqrt(2.0 / math.pi) * (y + self.cubic * torch.pow(y, 3.0))
        return (0.5 * y * (1.0 + torch.tanh(inner))).sum()


@pytest.mark.parametrize(("cubic", "fused"), [(0.044715, True), (0.0447, False), (0.05, False)])
def test_tanh_gelu(cubic: float, fused: bool) -> None:
    eager = WrittenOut(cubic)
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(5, 4)
    for run in (wrapped, eager):
        run(x).backward()
    assert ("approximate='tanh'" in wrapped.graph("captured")) is fused
    assert ("test_fusions.py" in wrapped.graph("captured").split("approximate='tanh'")[-1]) is True
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad, rtol=1e-5, atol=1e-6)


class Normalized(torch.nn.Module):
    """A normalization of a linear layer's result, with its scale."""

    def __init__(self, formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.scale, self.formula = torch.nn.Linear(4, 6), torch.nn.Parameter(torch.rand(6) + 0.5), formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self.linear(x), self.scale).square().sum()


def llama(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As Transformers writes it, for every type of x."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scale * wide.to(x.dtype)


NORMS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "llama": (llama, True),
    "gemma": (lambda x, scale: llama(x, 1.0 + scale), True),
    "torch": (lambda x, scale: F.rms_norm(x, (6,), scale, 1e-3), True),
    "quotient": (lambda x, scale: x / ((x * x).mean(-1, keepdim=True) + 0.1).sqrt() * scale, True),
    "square": (lambda x, scale: (0.1 + x.square().mean(1, keepdim=True)).rsqrt() * x * scale, True),
    "no scale": (lambda x, scale: F.rms_norm(x, (6,), None, 1e-3) * scale.sum(), False),
    "another axis": (lambda x, scale: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 0.1) * scale, False),
    "another power": (lambda x, scale: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 0.1) * scale, False),
    "of another value": (lambda x, scale: x * torch.rsqrt(x.sin().pow(2).mean(-1, keepdim=True) + 0.1) * scale, False),
    "the inverse quotient": (lambda x, s: (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() / (1 + x.square()) * s, False),
    "read twice": (lambda x, scale: (n := llama(x, torch.ones(())) + 0.0) * scale + n, False),
}


@pytest.mark.parametrize("name", NORMS)
def test_rms_norm(name: str) -> None:
    formula, fused = NORMS[name]
    wrapped, eager = pair(Normalized(formula).double())
    for rows in (5, 2, 1):
        same_step(wrapped, eager, torch.randn(rows, 4, dtype=torch.float64))
    assert ("RMSNorm(" in wrapped.graph("captured")) is fused


def test_rms_norm_of_half_precision() -> None:
    """The scale is a factor before the result is rounded."""
    eager = Normalized(llama).to(torch.bfloat16)
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(5, 4, dtype=torch.bfloat16)
    for run in (wrapped, eager):
        run(x).backward()
    assert "RMSNorm(" in wrapped.graph("captured")
    torch.testing.assert_close(wrapped.scale.grad, eager.scale.grad, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad, rtol=3e-2, atol=3e-2)


def attended(mask: Callable[[int], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention with a mask that is written out for the number of rows."""

    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(x.shape[1]))

    return run


def least(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


MASKS: dict[str, tuple[Callable[[int], torch.Tensor], bool]] = {
    "compared": (lambda n: torch.arange(n) <= torch.arange(n)[:, None], True),
    "compared, rows first": (lambda n: torch.arange(n)[:, None] >= torch.arange(n), True),
    "for each sample": (lambda n: (torch.arange(n) <= torch.arange(n)[:, None]).expand(2, 1, n, n), True),
    "a triangle": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), True),
    "the least number": (lambda n: least(torch.ones(n, n, dtype=torch.bool).tril()), True),
    "torch's own": (lambda n: torch.nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64), True),
    "a triangle hidden": (lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1), True),
    "compared, hidden": (lambda n: ~(torch.arange(n) > torch.arange(n)[:, None]), True),
    "the diagonal hidden": (lambda n: torch.triu(torch.full((n, n), -torch.inf, dtype=torch.float64), 2), False),
    "one further": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(1), False),
    "upwards": (lambda n: torch.ones(n, n, dtype=torch.bool).triu(), False),
    "a window": (lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-2), False),
    "columns after rows": (lambda n: torch.arange(n) >= torch.arange(n)[:, None], False),
    "from one on": (lambda n: torch.arange(n) <= torch.arange(1, n + 1)[:, None], False),
    "every second": (lambda n: torch.arange(0, 2 * n, 2) <= torch.arange(n)[:, None], False),
    "not by much": (lambda n: torch.where(torch.ones(n, n, dtype=torch.bool).tril(), 0.0, -3.0).double(), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_causal_attention(name: str) -> None:
    mask, causal = MASKS[name]
    wrapped, eager = pair(Applied(attended(mask)).double())
    for rows in (5, 7, 1):
        same_step(wrapped, eager, torch.randn(2, rows, 24, dtype=torch.float64))
    assert ("CausalScaledDotProductAttention(" in wrapped.graph("captured")) is causal
