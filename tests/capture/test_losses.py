"""Cross entropy in all its forms agrees with eager: smoothing, weights, ignored labels, probabilities."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Calls, pair, same_step

from onnxtrain import Options, ORTModule


class Loss(torch.nn.Module):
    def __init__(self, options: dict[str, Any], weighted: bool) -> None:
        super().__init__()
        self.linear, self.options = torch.nn.Linear(4, 5), options
        self.register_buffer("weight", torch.rand(5) + 0.5 if weighted else None)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x).movedim(-1, 1)
        return F.cross_entropy(scores, target, self.weight, **self.options).sum()


class Each(torch.nn.Module):
    """A loss of each label, in the labels' shape."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = torch.nn.Linear(4, 5), loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x)
        if self.loss is F.nll_loss:
            scores = scores.log_softmax(-1)
        each = self.loss(scores.flatten(0, 1), target.flatten(), reduction="none", ignore_index=2).view(target.shape)
        if self.loss is F.nll_loss:
            each = each + self.loss(scores.transpose(1, 2), target, reduction="none")
            each = each + self.loss(scores[0, 0], target[0, 0], reduction="none")
        return (each.sum(1) / target.shape[1]).square().sum()


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_losses_of_each_label_keep_their_sizes(loss: Callable[..., torch.Tensor]) -> None:
    wrapped, eager = pair(Each(loss).double())
    for batch, length in ((3, 4), (2, 6)):
        given = torch.randn(batch, length, 4, dtype=torch.float64)
        same_step(wrapped, eager, given, torch.randint(0, 5, (batch, length)))


LABELS, WIDE = torch.tensor([0, 4, 1, 2, 2, 3]), torch.randint(0, 5, (6, 3))
CASES = [
    ({"label_smoothing": 0.1}, False, LABELS),
    ({"label_smoothing": 0.3, "ignore_index": 2}, False, LABELS),
    ({"label_smoothing": 0.2, "ignore_index": 2}, True, LABELS),
    ({"label_smoothing": 0.2, "reduction": "sum"}, True, WIDE),
    ({"label_smoothing": 0.2, "reduction": "none"}, False, WIDE),
    ({"ignore_index": 1}, True, WIDE),
    ({}, False, torch.softmax(torch.arange(30.0).reshape(6, 5).sin(), 1)),
    ({"label_smoothing": 0.2}, True, torch.softmax(torch.arange(30.0).reshape(6, 5).cos(), 1)),
]


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize(("options", "weighted", "target"), CASES)
def test_cross_entropy(options: dict[str, Any], weighted: bool, target: torch.Tensor, backend: str) -> None:
    eager = Loss(options, weighted)
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(backend=backend))
    x = torch.randn(6, 3, 4) if target.dim() == 2 and not target.is_floating_point() else torch.randn(6, 4)
    losses = []
    for run in (wrapped, eager):
        loss = run(x, target)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_end_at_the_first_that_is_none(reduction: str) -> None:
    torch.manual_seed(2)
    labels = torch.stack([torch.randperm(5) for _ in range(4)])
    labels[torch.rand(4, 5) < 0.3] = -1
    wrapped, eager = pair(Calls(lambda scores, target: F.multilabel_margin_loss(scores, target, reduction=reduction)))
    for rows in (slice(None), slice(1), slice(1, 3)):
        same_step(wrapped, eager, torch.randn(len(labels[rows]), 5, requires_grad=True), labels[rows])


@pytest.mark.parametrize("labels", [torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_soft_margin_is_of_the_type_of_the_scores(reduction: str, labels: torch.dtype) -> None:
    wrapped, eager = pair(Calls(lambda x, y: F.soft_margin_loss(x, y, reduction=reduction)))
    for rows in (3, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        same_step(wrapped, eager, x, torch.randn(rows, 4).sign().to(labels))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_huber_loss_of_two_types_is_of_the_inputs(reduction: str) -> None:
    """Its backward pass raises in eager PyTorch."""
    wrapped, eager = pair(Calls(lambda x, y: F.huber_loss(x, y, reduction=reduction, delta=0.7)))
    given = torch.randn(5), torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(wrapped(*given), eager(*given))


class Similarity(torch.nn.Module):
    """Of rows of any length, as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = x * self.weight
        of_module = torch.nn.CosineSimilarity(-1, eps=1e-6)(rows, y[0])
        return F.cosine_similarity(rows, y, -1) + of_module + torch.cosine_similarity(rows, rows.flip(0), dim=1)


@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e-8, 1e-9, 1e-12, 0.0, 1e200])
def test_similarity_of_short_rows_has_the_gradient_of_torch(scale: float) -> None:
    wrapped, eager = pair(Similarity().double())
    for rows in (4, 2):
        x, y = torch.randn(2, rows, 3, dtype=torch.float64) * torch.tensor([scale, 1.0]).view(2, 1, 1)
        found = []
        for model in (wrapped, eager):
            model.zero_grad()
            given = x.clone().requires_grad_()
            made = model(given, y)
            made.sum().backward()
            found.append([made.detach(), given.grad, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12, equal_nan=True)
