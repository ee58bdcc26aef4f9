"""Dropout: eager's own masks on the torch backend, eager's statistics on onnxruntime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import ARCHITECTURES, build
from parity import pair

from onnxtrain import Options, ORTModule


class Drops(torch.nn.Module):
    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * self.weight, self.ratio, self.training)


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_torch_draws_the_masks_of_eager(ratio: float) -> None:
    eager = Drops(ratio)
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(32, 64)
    for seed in range(3):
        outs = []
        for run in (wrapped, eager):
            torch.manual_seed(seed)
            y = run(x)
            y.sum().backward()
            outs.append(y)
        torch.testing.assert_close(*outs)
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_ratio_and_scale(backend: str) -> None:
    wrapped = ORTModule(Drops(0.3), options=Options(backend=backend))
    x = torch.ones(400, 64)
    first, second = wrapped(x), wrapped(x)
    kept = first != 0
    assert abs(kept.float().mean().item() - 0.7) < 0.02
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 / 0.7))
    assert not torch.equal(first, second), "each call draws a new mask"
    first.sum().backward()
    torch.testing.assert_close(wrapped.weight.grad, first.detach().sum(0), rtol=1e-5, atol=1e-3)
    wrapped.eval()
    torch.testing.assert_close(wrapped(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_whole_model_with_dropout_draws_as_eager(name: str, attention: str) -> None:
    """Where no work is skipped, the same random numbers in the same order: the losses are equal, not only alike."""
    eager = build(name, attention, dropout=0.2)
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(compute_optimizer=False))
    for seed in range(3):
        torch.manual_seed(seed)
        given = ARCHITECTURES[name].batch(3, 8)
        losses = []
        for run in (wrapped, eager):
            torch.manual_seed(seed)
            loss = run(**given).loss
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_loss_statistics_on_onnxruntime() -> None:
    eager = build("bert", dropout=0.3)
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(backend="onnxruntime"))
    given = ARCHITECTURES["bert"].batch(8, 12)
    with torch.no_grad():
        samples = [torch.stack([run(**given).loss for _ in range(200)]) for run in (wrapped, eager)]
    means, spreads = [s.mean().item() for s in samples], [s.std().item() for s in samples]
    assert abs(means[0] - means[1]) < 5 * spreads[1] / 200**0.5
    assert 0.7 < spreads[0] / spreads[1] < 1.4


@pytest.mark.parametrize("draw", [F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_of_other_kinds_draws_as_eager(draw: Callable[..., torch.Tensor]) -> None:
    class Dropping(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return draw(x, 0.4, self.training)

    wrapped, eager = pair(Dropping())
    x = torch.randn(4, 6, 3, 2, 2, requires_grad=True)
    torch.manual_seed(3)
    expected = eager(x)
    torch.manual_seed(3)
    torch.testing.assert_close(wrapped(x), expected, rtol=0, atol=0)


def drops(x: torch.Tensor) -> None:
    F.dropout(x, 0.3).sum()
    F.gumbel_softmax(x)


def samples(x: torch.Tensor) -> None:
    torch.bernoulli(torch.full_like(x, 0.5))
    torch.randperm(x.shape[0])
    torch.multinomial(torch.ones(5), 2)
    x.clone().normal_()


def normal(x: torch.Tensor) -> None:
    torch.randn_like(x).mul(0).add(x)
    torch.normal(0.0, 1.0, (x.shape[0],))


def attends(x: torch.Tensor) -> None:
    F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.3)
    with torch.no_grad():
        torch.rand(x.shape)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("draw", [drops, samples, normal, attends])
def test_what_nobody_reads_is_drawn_all_the_same(
    draw: Callable[[torch.Tensor], None], kept: bool, tmp_path: Path
) -> None:
    """So that what is drawn after it is what eager draws, a number that decides on the path among it."""

    class Drawing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            draw(x)
            y = self.linear(x)
            return y * torch.rand(4) if torch.rand(()) < 0.5 else F.dropout(y, 0.5)

    for _ in range(1 + kept):
        wrapped, eager = pair(Drawing().double(), cache_dir=str(tmp_path) if kept else None)
        for step in range(6):
            x = torch.randn(18 + step % 2, 4, dtype=torch.double, requires_grad=True)
            found = []
            for model in (wrapped, eager):
                torch.manual_seed(step)
                y = model(x)
                found.append([y, *torch.autograd.grad(y.sum(), x), torch.rand(2)])
            torch.testing.assert_close(*found)
