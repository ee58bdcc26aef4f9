"""Branches and loops of torch (cond, scan, while_loop) inside of a module: eager's numbers."""

from __future__ import annotations

import pytest
import torch
from parity import captures, pair, same_step

from onnxtrain.errors import GradientError

BACKENDS = ("torch", "onnxruntime")


class Tried(torch.nn.Module):
    """Calls that torch refuses at some sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """Each has an answer where it is refused."""
        found = []
        for call in (self.rows, torch.add, torch.matmul, lambda x, y: torch.cat([x, y]), lambda x, y: x.reshape(2, -1)):
            try:
                made = call(x, y)
            except RuntimeError:
                made = x * 2
            found.append(made.sin().sum())
        try:
            found.append(x[5])
        except IndexError:
            found.append(x[0])
        return found

    def rows(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """In threes."""
        return x.view(-1, 3)


def test_a_call_that_raises_is_not_in_the_graph() -> None:
    wrapped, eager = pair(Tried())
    sizes = [((2, 4), (2, 4)), ((6, 3), (3, 6)), ((4, 4), (4, 4)), ((7, 5), (1, 1)), ((2, 6), (6, 2)), ((2, 4), (3, 4))]
    for x, y in sizes:
        same_step(wrapped, eager, torch.randn(x, requires_grad=True), torch.randn(y, requires_grad=True))


class Choice(torch.nn.Module):
    """Two layers of which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sign of the sum decides."""
        h = torch.tanh(x)
        y = torch.cond(x.sum() > 0, lambda h: self.first(h).sin(), lambda h: self.second(h) * h * 2, (h,))
        return self.last(y + h)


class Nested(torch.nn.Module):
    """A branch inside of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three ways."""

        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.max() > 10, lambda x: self.first(x), lambda x: self.second(x).exp(), (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: x.cos(), (x,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_branch(backend: str) -> None:
    wrapped, eager = pair(Choice(), backend=backend)
    for batch, shift in ((3, 2.0), (5, -2.0), (2, 2.0)):
        same_step(wrapped, eager, torch.randn(batch, 4, requires_grad=True) + shift)
    assert captures(wrapped) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_branch_in_a_branch(backend: str) -> None:
    wrapped, eager = pair(Nested(), backend=backend)
    for shift in (2.0, -2.0, 20.0):
        same_step(wrapped, eager, (torch.randn(3, 4) + shift).requires_grad_())
    assert captures(wrapped) == 1


class Recurrence(torch.nn.Module):
    """A hand-written recurrent layer.

    Args:
        unrolled: the loop is Python's, not torch's operator, of which torch 2.11 has wrong gradients.
    """

    def __init__(self, unrolled: bool = False) -> None:
        super().__init__()
        self.cell, self.unrolled = torch.nn.Linear(4, 4), unrolled

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Over the first axis, by torch's scan operator."""
        from torch._higher_order_ops.scan import scan

        def step(h: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tanh(self.cell(h) + row)
            return new, new * row

        state, rows = torch.zeros_like(x[0]), []
        if not self.unrolled:
            return scan(step, state, x, dim=0)
        for row in x:
            state, made = step(state, row)
            rows.append(made)
        return state, torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scan(backend: str) -> None:
    wrapped, _ = pair(Recurrence(), backend=backend)
    eager = Recurrence(unrolled=True)
    eager.load_state_dict(wrapped.state_dict())
    for length in (5, 3):
        same_step(wrapped, eager, torch.randn(length, 2, 4, requires_grad=True))


class Dropped(torch.nn.Module):
    """A branch with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Random in one of the branches."""
        return torch.cond(x.sum() > 0, lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: x * 2, (x,))


def test_random_branch_is_refused() -> None:
    wrapped, _ = pair(Dropped(), backend="torch")
    with pytest.raises(GradientError, match="If with Dropout, which is random") as raised:
        wrapped(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert "rewrite" in raised.value.cure
