"""Gradients that are added to those that are there: of a large table only the rows that a batch reads are touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import pair
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule
from onnxtrain.execute.torch.allocations import peak_of

Tensor = torch.Tensor
SIZE, READ = 3000, 40  # rows of a table, and of those the ones that batches read


class Tables(nn.Module):
    """Reads rows of two tables: of an embedding, and of a parameter by indexing it.

    Args:
        padding: the index of the embedding whose row receives no gradient.
    """

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, 8, padding_idx=padding)
        self.table = nn.Parameter(torch.randn(SIZE, 4))
        self.head = nn.Linear(12, 5)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.head(torch.cat([self.embedding(ids), self.table[ids]], -1))
        return F.cross_entropy(y.flatten(0, 1), ids.flatten() % 5)


def _batch() -> Tensor:
    return torch.randint(0, READ, (4, 9))


def _gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


def _are_equal(made: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, made, expected))


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_several_batches_are_summed(padding: int | None, dtype: torch.dtype) -> None:
    """Bit by bit the sum of the gradients of each, in the memory of the first one."""
    model = ORTModule(Tables(padding).to(dtype))
    places = set()
    for _ in range(4):
        ids, before = _batch(), _gradients(model)
        alone = torch.autograd.grad(model(ids), list(model.parameters()))
        model(ids).backward()
        assert _are_equal(_gradients(model), [x + y for x, y in zip(before, alone, strict=True)])
        places.add(model.module.embedding.weight.grad.data_ptr())
    assert len(places) == 1


def test_both_tables_are_added_to_by_row() -> None:
    model = ORTModule(Tables())
    model(_batch()).backward()
    assert model.source("backward").count("into=made[") == 2


def test_no_second_table_is_made() -> None:
    model, ids = ORTModule(Tables()), _batch()

    def step() -> None:
        model(ids).backward()

    step()
    assert peak_of(step) < SIZE * 8 * 4 / 2


def test_zeros_are_a_gradient_that_is_there() -> None:
    model, ids = ORTModule(Tables()), _batch()
    model(ids).backward()
    expected = _gradients(model)
    model.zero_grad(set_to_none=False)
    model(ids).backward()
    assert _are_equal(_gradients(model), expected)


def _asked_for(model: Any, ids: Tensor) -> None:
    torch.autograd.grad(model(ids), list(model.parameters()))


def _of_others(model: Any, ids: Tensor) -> None:
    model(ids).backward(inputs=[model.module.head.weight])


@pytest.mark.parametrize("use", [_asked_for, _of_others])
def test_a_gradient_that_is_not_added_to_stays(use: Callable[[Any, Tensor], None]) -> None:
    model, ids = ORTModule(Tables()), _batch()
    model(ids).backward()
    before = _gradients(model)[:2]
    use(model, ids)
    assert _are_equal(_gradients(model)[:2], before)


def _hook(parameter: Tensor, seen: list[Tensor]) -> None:
    parameter.register_hook(lambda g: seen.append(g.clone()))


def _late_hook(parameter: Tensor, seen: list[Tensor]) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


@pytest.mark.parametrize("register", [_hook, _late_hook])
def test_hooks_see_what_they_see_in_eager(register: Callable[[Tensor, list[Tensor]], None]) -> None:
    seen: list[list[Tensor]] = []
    batches = [_batch() for _ in range(3)]
    for model in pair(Tables().double()):
        seen.append([])
        for parameter in list(model.parameters())[:2]:
            register(parameter, seen[-1])
        for ids in batches:
            model(ids).backward()
    assert len(seen[0]) == 6
    by_size = [sorted(s, key=lambda g: g.shape[1]) for s in seen]
    torch.testing.assert_close(*by_size)


def _retained(model: nn.Module, ids: Tensor) -> None:
    loss = model(ids)
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def _two_calls(model: nn.Module, ids: Tensor) -> None:
    (model(ids) * model(ids[:2])).backward()


def _penalty(model: nn.Module, ids: Tensor) -> None:
    slopes = torch.autograd.grad(model(ids), list(model.parameters()), create_graph=True)
    sum(s.square().sum() for s in slopes).backward()


def _created(model: nn.Module, ids: Tensor) -> None:
    model(ids).backward(create_graph=True)


def _beside(model: nn.Module, ids: Tensor) -> None:
    (model(ids) + next(iter(model.parameters()))[ids].square().sum()).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("segments", [1, 100])
@pytest.mark.parametrize("use", [_retained, _two_calls, _penalty, _created, _beside])
def test_other_backward_passes(use: Callable[[nn.Module, Tensor], None], segments: int) -> None:
    wrapped, eager = pair(Tables().double(), segments=segments)
    for _ in range(3):
        ids = _batch()
        use(wrapped, ids)
        use(eager, ids)
        torch.testing.assert_close(_gradients(wrapped), _gradients(eager))


class Scaled(nn.Module):
    """Reads rows of a table, and a tensor of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, 8)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return (self.embedding(ids) * scale[ids]).sum() + (scale * scale).tanh().sum()


def test_a_gradient_among_the_inputs_is_not_changed_while_it_is_read() -> None:
    wrapped, eager = pair(Scaled().double())
    scale = torch.randn(SIZE, 8, dtype=torch.double)
    for model in (wrapped, eager):
        next(iter(model.parameters())).grad = scale.clone()
        ids = torch.arange(9)
        for _ in range(2):
            (weight,) = model.parameters()
            model(ids, weight.grad).backward()
    torch.testing.assert_close(_gradients(wrapped), _gradients(eager))


class Rows(nn.Module):
    """Rows of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(SIZE, 8), nn.Embedding(SIZE, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(ids) * 2 + self.second(ids)
        return y, y.sin()


def test_a_gradient_that_is_itself_walked_back_is_not_changed_while_it_is_read() -> None:
    wrapped, eager = pair(Rows().double())
    gradient = torch.randn(SIZE, 8, dtype=torch.double)
    for model in (wrapped, eager):
        for parameter in model.parameters():
            parameter.grad = gradient.clone()
        for parameter in model.parameters():
            dy = parameter.grad[:9]
            model(torch.arange(9))[0].backward(dy.clone() if model is eager else dy)  # eager's own order shows in dy
    torch.testing.assert_close(_gradients(wrapped), _gradients(eager))


def test_under_autocast() -> None:
    wrapped, eager = pair(Tables())
    for _ in range(3):
        ids = _batch()
        for model in (wrapped, eager):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids)
            loss.backward()
    torch.testing.assert_close(_gradients(wrapped), _gradients(eager), rtol=2e-2, atol=1e-3)
