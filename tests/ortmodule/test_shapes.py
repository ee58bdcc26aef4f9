"""One graph for all batch sizes and lengths."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from models import build, classified
from parity import captures

from onnxtrain import Options, ORTModule


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_one_graph_serves_300_random_sizes(backend: str) -> None:
    eager = build("bert")
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(backend=backend))
    rng = random.Random(5)
    sizes = [(1, 1), (1, 9), (4, 1), *((rng.randint(1, 9), rng.randint(1, 40)) for _ in range(297))]
    for batch, length in sizes:
        given = classified(batch, length)
        losses = [m(**given).loss for m in (wrapped, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(wrapped.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=2e-6)
            ours.grad = theirs.grad = None
    assert captures(wrapped) == 2  # attention asks whether there is one query: for length 1 there is another graph


def test_size_that_the_module_fixes_makes_a_new_graph() -> None:
    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.reshape(-1, 2, 4) if x.shape[0] == 2 else x).sum()

    wrapped = ORTModule(Halves())
    for rows in (2, 3, 2, 5):
        x = torch.randn(rows, 4)
        wrapped(x).backward()
        torch.testing.assert_close(wrapped(x), wrapped.module(x))


def test_a_branch_on_a_size_makes_a_new_graph() -> None:
    class Doubles(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum() * (2 if x.shape[0] * 2 > 9 and x.shape[1] % 4 == 0 else 1)

    wrapped = ORTModule(Doubles())
    for rows in (3, 6, 2, 5, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), wrapped.module(x))
    assert captures(wrapped) == 2


def test_broadcast_input_of_size_one() -> None:
    class Add(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x * self.weight + y).sum()

    wrapped = ORTModule(Add())
    for shape in ((1, 3), (4, 3), (1, 1)):
        x, y = torch.randn(4, 3), torch.randn(shape, requires_grad=True)
        loss = wrapped(x, y)
        loss.backward()
        torch.testing.assert_close(loss, wrapped.module(x, y))
        assert y.grad is not None and y.grad.shape == shape
        torch.testing.assert_close(y.grad, torch.full(shape, 12 / y.numel()))


def test_a_value_of_which_only_the_size_is_read() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            different = torch.unique(x.long())
            return self.linear(x).mean() + x.new_zeros(different.shape[0])

    eager = Counts()
    wrapped = ORTModule(copy.deepcopy(eager))
    for batch in (5, 9):
        x = torch.randn(batch, 4) * 3
        made = [m(x) for m in (wrapped, eager)]
        for y in made:
            y.sum().backward()
        torch.testing.assert_close(*made)
        torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "axes", [((1, 1), (1, 3), (1, 3)), ((2, 3), (1, 3), (1, 3)), ((1, 3), (2, 3), (2, 3)), ((2, 1), (2, 3), (2, 1))]
)
def test_attention_broadcasts_batches_and_heads(axes: tuple[tuple[int, int], ...], masked: bool) -> None:
    """The fused kernel does not: it reads beyond its memory."""

    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            q, k, v = (x * self.weight for x in given)
            mask = torch.arange(k.shape[2]) < 4 if masked else None
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)

    eager = Attends()
    wrapped = ORTModule(copy.deepcopy(eager))
    for length in (5, 6, 5):
        given = [torch.randn(*some, length, 4, dtype=torch.float64, requires_grad=True) for some in axes]
        copies = [x.detach().clone().requires_grad_() for x in given]
        results = eager(*given), wrapped(*copies)
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close([x.grad for x in copies], [x.grad for x in given])
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)


def test_a_choice_among_nothing_is_captured_first() -> None:
    class Chooses(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            places = torch.nn.functional.one_hot(torch.arange(x.shape[0] - 1, -1, -1) % 4, 4).to(y.dtype)
            return y.where(places > 1, places)

    eager = Chooses().eval()
    wrapped = ORTModule(eager)
    for length in (0, 3, 0):
        given = torch.randn(length, 2), torch.randn(length, 4)
        torch.testing.assert_close(wrapped(*given), eager(*given))


def test_nothing_that_is_joined_has_a_gradient_of_nothing() -> None:
    class Joined(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.flatten(), y])

    eager = Joined()
    wrapped = ORTModule(eager)
    for rows in (0, 3, 0):
        given = torch.randn(rows, 2, requires_grad=True), torch.randn(4, requires_grad=True)
        copies = [x.detach().clone().requires_grad_() for x in given]
        eager(*given).square().sum().backward()
        wrapped(*copies).square().sum().backward()
        torch.testing.assert_close([x.grad for x in copies], [x.grad for x in given])
