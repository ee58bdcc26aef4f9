"""Inputs that the forward pass changes in place, beside eager PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Calls, captures, pair, same_step
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError


class Piece(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.code = code

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self.weight, *args, **kwargs)


class Two(Piece):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.code(self.weight, a, b)


def _content(rows: int) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)


def _leaf(rows: int) -> Tensor:
    return _content(rows).requires_grad_()


def _inner(rows: int) -> Tensor:
    """A tensor that requires a gradient and is no leaf."""
    return _leaf(rows) * 1.0


def _without_grad(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def code(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(w, x)
        return x * w

    return code


def _cache(w: Tensor, x: Tensor, cache: Tensor) -> Tensor:
    cache[:, 1:3] = (x * w)[:, 1:3]
    return cache.sum() + x.sum()


def _of_dict(w: Tensor, batch: dict[str, Tensor]) -> Tensor:
    batch["mask"].logical_not_()
    return (batch["x"] * w).masked_fill(batch["mask"], 0.0)


def _looks(w: Tensor, x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x * w if x.detach().sum() > 0 else x - w


def _twice(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    before = x + w
    x += w
    middle = x * 2
    x[0] *= 3
    return before + middle, x


# Each with what it is given; of that what requires a gradient is a leaf, or is given as the result of an operator
CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], bool]] = {
    "a plain tensor": (lambda w, x: x.add_(1.0) * w, lambda n: (_content(n),), False),
    "one with a history": (lambda w, x: x.mul_(w).sin(), lambda n: (_leaf(n),), True),
    "read before and after": (_twice, lambda n: (_leaf(n),), True),
    "a part": (lambda w, x: (x[:, 1:].mul_(2.0) * w[1:]).sum() + x.sum(), lambda n: (_content(n),), False),
    "returned": (lambda w, x: x.mul_(w), lambda n: (_leaf(n),), True),
    "made to need a gradient": (lambda w, x, y: y.copy_(x * w).sum(), lambda n: (_content(n), _content(n)), False),
    "a cache": (_cache, lambda n: (_leaf(n), torch.zeros(n, 4, dtype=torch.float64)), False),
    "detached": (lambda w, x: (x.detach().mul_(2.0), x.detach() * w)[1], lambda n: (_leaf(n),), True),
    "of a leaf": (_without_grad(lambda w, x: x.mul_(w)), lambda n: (_leaf(n),), False),
    "integers": (lambda w, i: w[i.clamp_(max=2)].sum(), lambda n: (torch.randint(0, 4, (n,)),), False),
    "in a dict": (_of_dict, lambda n: ({"x": _leaf(n), "mask": torch.rand(n, 4) > 0.5},), True),
    "after a look": (_looks, lambda n: (_leaf(n),), True),
    "a column of another": (lambda w, x: x.add_(1.0) * w[0], lambda n: (_content(n)[:, 1],), False),
    "transposed": (lambda w, x: (x.t() + w.sum()).sum() + x.exp_().sum(), lambda n: (_leaf(4)[:, :3].t(),), True),
    "nothing that is read": (lambda w, x, y: (x * w, y.zero_())[0], lambda n: (_content(n), _content(n)), False),
}


def _given(args: Any, is_inner: bool) -> tuple[Any, list[Tensor]]:
    """The same arguments, laid out alike in other memory, and those of their leaves that get gradients."""
    leaves: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
        if not x.requires_grad:
            return made
        leaves.append(made.requires_grad_())
        return made * 1.0 if is_inner else made

    return torch.utils._pytree.tree_map_only(torch.Tensor, one, args), leaves


def _sum_of(values: Any) -> Tensor:
    """A number of all that has a gradient, no two elements alike."""
    found = [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]
    return sum((x * torch.arange(1.0, x.numel() + 1).view(x.shape).cos()).sum() for x in found)  # type: ignore


def same(case: str, rows: int, wrapped: ORTModule, eager: nn.Module) -> None:
    """One step of both, on arguments that are theirs; what comes of these, and their gradients, are the same."""
    _, made, is_inner = CASES[case]
    (args, ours), (other, theirs) = (_given(inputs, is_inner) for inputs in [made(rows)] * 2)
    results = [module(*a) for module, a in ((wrapped, args), (eager, other))]
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(args, other, rtol=1e-12, atol=0)
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (args, other)), strict=True)
    assert all(a.requires_grad == b.requires_grad for a, b in pairs)
    losses = [_sum_of((result, a)) for result, a in zip(results, (args, other), strict=True)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for module, loss in zip((wrapped, eager), losses, strict=True):
        module.zero_grad()
        loss.backward()
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_inputs_become_what_they_become_in_eager_pytorch(case: str) -> None:
    """At two sizes, and again."""
    module = Piece(CASES[case][0])
    wrapped, eager = ORTModule(copy.deepcopy(module)), module
    for rows in (5, 3, 5):
        same(case, rows, wrapped, eager)


@pytest.mark.parametrize("case", ["a plain tensor", "one with a history", "a cache", "in a dict"])
def test_a_verified_step_compares_them(case: str) -> None:
    module = Piece(CASES[case][0])
    wrapped = ORTModule(copy.deepcopy(module), options=Options(verify=True))
    same(case, 4, wrapped, module)


def test_a_second_start_writes_them(tmp_path: Path) -> None:
    for _ in range(2):
        module = Piece(CASES["a cache"][0])
        same("a cache", 4, ORTModule(copy.deepcopy(module), options=Options(cache_dir=tmp_path)), module)


def test_without_gradients_they_are_written_too() -> None:
    module = Piece(lambda w, x: x.add_(w).sum())
    wrapped, x = ORTModule(copy.deepcopy(module)), _content(3)
    y = x.clone()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(wrapped(x), module(y))
        torch.testing.assert_close(x, y)
        assert not x.requires_grad


def test_a_tensor_that_comes_twice_changes_once() -> None:
    module = Piece(lambda w, a, b: a.mul_(2.0) * w + b)
    wrapped, x = ORTModule(copy.deepcopy(module)), _content(3)
    y = x.clone()
    for _ in range(2):
        torch.testing.assert_close(wrapped(x, x), module(y, y))
        torch.testing.assert_close(x, y)


def test_one_that_the_backward_pass_of_another_operator_needs_is_told_by_autograd() -> None:
    module = Piece(lambda w, x: x.mul_(w))
    x = _content(3).requires_grad_().exp()  # which needs its result
    loss = ORTModule(module)(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("given", ["a view", "a buffer", "integers twice"])
def test_a_part_of_another_tensor_is_refused(given: str) -> None:
    """Before the first step and at a later one, with nothing written."""
    module = Two(lambda w, a, b: a.mul_(2) * w + b)
    module.register_buffer("held", torch.ones(3, 4, dtype=torch.float64))
    wrapped, x, i = ORTModule(module), _content(3), torch.ones(3, 4, dtype=torch.int64)
    args = {"a view": (x, x[:1]), "a buffer": (module.held, x), "integers twice": (i, i)}[given]
    for _ in range(2):
        before = args[0].clone()
        with pytest.raises(CaptureError, match="modifies its input a in place, which shares memory") as raised:
            wrapped(*args)
        assert raised.value.source.startswith(__file__)
        assert torch.equal(args[0], before)
        wrapped(args[0].clone(), args[1].clone())


def test_an_expanded_tensor_is_refused() -> None:
    """Eager PyTorch changes each element as often as it comes."""
    wrapped, x = ORTModule(Piece(lambda w, x: x.fill_(2.0) * w)), torch.ones(4, dtype=torch.float64)
    with pytest.raises(CaptureError, match="in place, which is expanded from a smaller one"):
        wrapped(x.expand(3, 4))
    assert torch.equal(x, torch.ones_like(x))


def test_a_changed_shape_is_refused() -> None:
    wrapped = ORTModule(Piece(lambda w, x: x.unsqueeze_(0) * w))
    with pytest.raises(CaptureError, match="changes the shape of its input") as raised:
        wrapped(_content(3))
    assert raised.value.source.startswith(__file__)


KEPT = [torch.ones(3)]


class Reshapes(torch.nn.Module):
    """A buffer, an attribute and a tensor in a list of others, all of three elements."""

    def __init__(self, change: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))
        self.scale, self.change = torch.ones(3), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return x * self.mean.sum() * self.scale.sum() * KEPT[0].sum()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda module: module.mean.unsqueeze_(0), "mean"),
        (lambda module: module.mean.contiguous().resize_(1, 3), "mean"),
        (lambda module: module.scale.unsqueeze_(0), "a tensor from elsewhere"),
        (lambda module: KEPT[0].unsqueeze_(0), "a tensor from elsewhere"),
    ],
    ids=["a buffer", "a buffer under another name", "an attribute", "of others"],
)
def test_a_changed_shape_of_what_stays_is_refused(change: Callable[[Any], torch.Tensor], what: str) -> None:
    with pytest.raises(CaptureError, match=f"changes the shape of {what} in place") as raised:
        ORTModule(Reshapes(change))(_content(3))
    assert raised.value.source.startswith(__file__) and KEPT[0].shape == (3,)


def test_a_leaf_is_torchs_error() -> None:
    wrapped = ORTModule(Piece(lambda w, x: x.mul_(w)))
    with pytest.raises(CaptureError, match="a leaf Variable that requires grad is being used in an in-place"):
        wrapped(_content(3).requires_grad_())
    wrapped(_inner(3))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        wrapped(_content(3).requires_grad_())


def test_sizes_make_no_graph_of_their_own() -> None:
    wrapped = ORTModule(Piece(CASES["one with a history"][0]))
    for rows in (5, 3, 2):
        wrapped(_inner(rows))
    assert captures(wrapped) == 1


@dataclasses.dataclass
class Batch:
    """What a forward pass is given, in an object of the user's."""

    content: Tensor


def test_a_rehearsal_leaves_what_is_in_an_object_as_it_was() -> None:
    def code(w: Tensor, batch: Batch) -> Any:
        batch.content *= 3
        return batch.content * w * (2 if batch.content.sum() > 0 else 1), batch

    wrapped, eager = ORTModule(Piece(code)), Piece(code)
    for sign in (1, -1, 1):
        ours, theirs = (Batch(torch.full((2, 4), float(sign), dtype=torch.float64)) for _ in range(2))
        torch.testing.assert_close(wrapped(ours)[0], eager(theirs)[0])
        torch.testing.assert_close(ours.content, theirs.content)


MAPPED = {
    "whole": lambda y: torch.vmap(lambda row: row.mul_(2))(y) * y,
    "read after it": lambda y: torch.vmap(lambda row: row.mul_(2) + row[0])(y) + y.sin(),
    "a part": lambda y: torch.vmap(lambda row: row[:1].mul_(2) * 3)(y) + y.sin(),
    "of columns": lambda y: torch.vmap(torch.Tensor.add_, in_dims=(1, None))(y, torch.ones(3)).exp() + y.T,
    "changed again": lambda y: torch.vmap(lambda row: row.mul_(2))(y).add_(1) * y,
}


@pytest.mark.parametrize("name", MAPPED)
def test_what_a_mapped_function_changes(name: str) -> None:
    wrapped, eager = pair(Calls(lambda x: MAPPED[name](x * 1)))
    same_step(wrapped, eager, torch.randn(3, 3, requires_grad=True))
    wrapped, eager = pair(Calls(MAPPED[name]))
    given = torch.randn(3, 3)
    ours, theirs = given.clone(), given.clone()
    torch.testing.assert_close((wrapped(ours), ours), (eager(theirs), theirs))


class LooksAndChangesShape(nn.Module):
    """Looks into its input, so that it is rehearsed, writes to it and gives it or a buffer another shape."""

    def __init__(self, change: Callable[[Tensor], Any], of_buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))
        self.register_buffer("table", torch.arange(9, dtype=torch.float64).view(3, 3))
        self.change, self.of_buffer = change, of_buffer

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = x * self.weight + self.table
        x.fill_(1)
        self.change(self.table if self.of_buffer else x)
        return y, float(y.detach().mean())


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda t: t.transpose_(0, 1),
    "unsqueezed": lambda t: t.unsqueeze_(0),
    "smaller": lambda t: t.resize_(2, 2),
    "larger": lambda t: t.resize_(5, 5).fill_(2),
    "strided": lambda t: t.as_strided_((2, 2), (1, 2)),
    "elsewhere": lambda t: t.set_(torch.zeros(4, 2, dtype=torch.float64)),
    "other data": lambda t: setattr(t, "data", torch.zeros(3, 3, dtype=torch.float64)),
}


@pytest.mark.parametrize("of_buffer", [False, True])
@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_a_rehearsal_takes_back_shapes_too(change: Callable[[Tensor], Any], of_buffer: bool) -> None:
    eager, given = LooksAndChangesShape(change, of_buffer), torch.randn(3, 3, dtype=torch.float64)
    ours, x = ORTModule(copy.deepcopy(eager), options=Options(summary=False)), given.clone()
    try:
        found = ours(x)
    except CaptureError:  # in words, and with all as it was
        assert torch.equal(x, given) and x.stride() == (3, 1)
        assert torch.equal(ours.table, eager.table) and ours.table.stride() == (3, 1)
        return
    expected_input = given.clone()
    torch.testing.assert_close(found, eager(expected_input))
    torch.testing.assert_close((x, ours.table), (expected_input, eager.table))


def test_eager_pytorch_serves_what_was_rehearsed_and_refused() -> None:
    eager, given = LooksAndChangesShape(SHAPES["transposed"], False), torch.randn(3, 3, dtype=torch.float64)
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False, fallback="eager"))
    for _ in range(2):
        one, other = given.clone(), given.clone()
        torch.testing.assert_close(ours(one), eager(other))
        torch.testing.assert_close(one, other)
