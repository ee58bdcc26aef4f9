"""Sizes that turn into numbers: each is symbolic in the graph, or the graph serves that size alone."""

from __future__ import annotations

import copy
import fractions
import functools
import math
import numbers
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import Applied, Calls, captures, pair, same_step
from torch.torch_version import TorchVersion

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor

BEFORE_2_12 = TorchVersion(torch.__version__) < (2, 12)


class Written(torch.nn.Module):
    """A product, and what a test does with it and its input."""

    def __init__(self, rest: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.3 * torch.randn(4, 4, dtype=torch.float64))
        self._rest = rest

    def forward(self, x: Tensor) -> Tensor:
        return self._rest(x @ self.weight, x)


def _lengths(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*size, 4, dtype=torch.float64) for size in sizes]


def _causal(y: Tensor, x: Tensor) -> Tensor:
    lower = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return (y @ x.mT).masked_fill(~lower, 0)


SEQUENCES = ((2, 5), (2, 6), (3, 9), (2, 4))
WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "as_tensor": lambda y, x: y * torch.as_tensor([x.shape[1] // 2], dtype=x.dtype),
    "new_tensor": lambda y, x: y * x.new_tensor([x.shape[1] // 2]),
    "tensor": lambda y, x: y / torch.tensor(x.shape[1]),
    "index by a tensor of sizes": lambda y, x: y[:, torch.tensor([0, x.shape[1] - 1])],
    "index by a number beside others": lambda y, x: y[torch.arange(x.shape[0]), x.sum((0, 2)).argmax()],
    "index by a number before a mask": lambda y, x: y.transpose(0, 1)[x.sum((0, 2)).argmax(), x[:, 0, 0] > -9],
    "index by a place and a mask": lambda y, x: y[torch.tensor([0]), x[0, :, 0] > 0].sum(0) + x.sum(),
    "index by a mask of two axes and a place": lambda y, x: y[x[..., 0] > 0, torch.tensor([2])].sum(0) + x.sum(),
    "linspace": lambda y, x: y[:, torch.linspace(0, x.shape[1] - 1, x.shape[1] // 2).long()],
    "scale of attention": lambda y, x: F.scaled_dot_product_attention(y, x, x, scale=1 / math.sqrt(x.shape[1])),
    "take_along_dim": lambda y, x: torch.take_along_dim(y.flatten(0, 1), 2 * (x > 0).long().flatten(0, 1), 0),
    "tensor_split": lambda y, x: sum((i + 1) * part.sum() for i, part in enumerate(y.tensor_split(2, 1))),
    "chunk": lambda y, x: sum((i + 1) * part.sum() for i, part in enumerate(y.chunk(2, 1))),
    "chunks by a size": lambda y, x: sum((i + 1) * part.sum() for i, part in enumerate(y.chunk(x.shape[1] // 2, 1))),
    "chunks of what may be nothing": lambda y, x: sum((part.sum() for part in y[:, 5:].chunk(2, 1)), x.sum()),
    "a size divided by torch": lambda y, x: y.reshape(
        x.shape[0], torch.div(x.shape[1] * 4, 2, rounding_mode="trunc"), 2
    ).cumsum(1),
    "transformed twice": lambda y, x: torch.fft.fft2(torch.fft.fft2(y).real.clone()).real,
    "the last of what was rolled": lambda y, x: (y + 0.5 * y.roll(1, 1))[:, -1].square().sum(),
    "split in a loop": lambda y, x: sum(part.pow(i + 1).sum() for i, part in enumerate(y.split(2, 1))),
    "repeat_interleave": lambda y, x: y.repeat_interleave(x.shape[1], 0).cumsum(0),
    "repeat_interleave of all": lambda y, x: y.repeat_interleave(x.shape[0]).cumsum(0),
    "slice that may begin beyond the end": lambda y, x: y[:, 5:].sum((1, 2)) + x.sum(),
    "half": lambda y, x: y[:, : max(1, x.shape[1] // 2)],
    "loop over a range": lambda y, x: sum(y[:, i].sum(-1) * (i + 1) for i in range(x.shape[1])),
    "logarithm": lambda y, x: y * math.log(x.shape[1]),
    "float": lambda y, x: y * float(x.shape[1]) ** 0.5,
    "full": lambda y, x: y + torch.full((x.shape[1], 1), x.shape[1] / 3.0),
    "unfold": lambda y, x: y.unfold(1, 3, 2),
    "roll": lambda y, x: y.roll(x.shape[1] // 2, 1) * torch.arange(x.shape[1]).view(1, -1, 1),
    "pad": lambda y, x: F.pad(y.flip(1), (0, 0, 0, 10 - x.shape[1])).cumsum(1),
    "arange backwards": lambda y, x: y * torch.arange(x.shape[1] - 1, -1, -1).view(1, -1, 1),
    "causal": _causal,
    "topk": lambda y, x: y.sum(-1).topk(x.shape[1] // 2, 1).values,
    "adaptive pooling": lambda y, x: F.adaptive_avg_pool1d(y.mT, 2),
    "pooling": lambda y, x: F.max_pool2d(y, 2, return_indices=True)[0],
    "pooling beyond the end": lambda y, x: F.avg_pool2d(y, 3, 2, ceil_mode=True),
    "interpolate": lambda y, x: F.interpolate(y.mT, size=x.shape[1] * 2, mode="linear"),
    "deviation": lambda y, x: y.std(1),
}


def compare(written: Callable[[Tensor, Tensor], Any], batches: list[Tensor]) -> ORTModule:
    """Train on the batches with and without a graph; outputs and gradients are the same to rounding of float64."""
    torch.manual_seed(0)
    module = Written(written)
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for batch in batches:
        ours, theirs = (batch.clone().requires_grad_() for _ in range(2))
        found, wanted = wrapped(ours), eager(theirs)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        found.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(module.weight.grad, eager.weight.grad, rtol=1e-9, atol=1e-9)
    return wrapped


@pytest.mark.parametrize("name", WRITTEN)
def test_a_later_size_is_computed_as_eager_does(name: str) -> None:
    compare(WRITTEN[name], _lengths(*SEQUENCES))


def test_what_is_left_of_one_is_nothing() -> None:
    def shifted(y: Tensor, x: Tensor) -> Tensor:
        part = (y * 1)[:, 1:]
        return part.mul_(3.0)

    compare(shifted, _lengths((2, 1), (2, 5), (2, 2), (1, 1)))


IN_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {  # a view or a copy, as sizes have it
    "reshaped": lambda y: y.transpose(0, 1).reshape(-1, 4),
    "contiguous": lambda y: y.transpose(0, 1).contiguous(),
    "flat": lambda y: y[None].transpose(0, 2).flatten(),
    "a column": lambda y: y[:, 0].contiguous(),
    "an even part": lambda y: y[:, : y.shape[1] // 2 * 2].reshape(-1),
    "some rows": lambda y: y[:, :2].reshape(-1),
    "an even part, contiguous": lambda y: y[:, : y.shape[1] // 2 * 2].contiguous(),
}


@pytest.mark.parametrize("first", [(1, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("name", IN_MEMORY)
def test_what_is_written_is_a_copy_or_a_view(name: str, first: tuple[int, int]) -> None:
    """At sizes of 1, and where all of a tensor is taken, torch makes no copy: what is written there is written here."""

    def result_written(y: Tensor, x: Tensor) -> Tensor:
        part = IN_MEMORY[name](y * 1)
        return part.mul_(3).sum() * y

    def both_read(y: Tensor, x: Tensor) -> Tensor:
        whole = y * 1
        IN_MEMORY[name](whole).mul_(3)
        return whole

    def source_written(y: Tensor, x: Tensor) -> Tensor:
        whole = y * 1
        part = IN_MEMORY[name](whole)
        whole[:, 0].mul_(3)
        return part * x.mean()

    for rest in (result_written, both_read, source_written):
        compare(rest, _lengths(first, (2, 1), (3, 3), (1, 3), (3, 2), (2, 4), (1, 1)))


@pytest.mark.parametrize("sizes", [((2, 1), (2, 5), (1, 2)), ((3, 4), (3, 1), (2, 2)), ((1, 2), (4, 1), (1, 1))])
def test_there_is_one_part_of_one(sizes: tuple[tuple[int, int], ...]) -> None:
    compare(lambda y, x: y.chunk(2, 1)[-1], _lengths(*sizes))
    compare(lambda y, x: y.new_full(((x.shape[0] + 1) // 2,), 3).chunk(2)[-1] * y.sum(), _lengths(*sizes))
    compare(lambda y, x: y.chunk(3, 1)[-1], _lengths(*sizes))


def test_a_count_of_elements_is_not_that_of_a_larger_batch() -> None:
    """Sizes of 1 are captured as if they were larger: where that shows in a number they are not."""
    compare(lambda y, x: y / int(x.numel()), _lengths((1, 5), (2, 6), (1, 7)))


def test_an_axis_taken_apart_from_behind() -> None:
    """It has one size in each graph; its parts are no sequence."""

    def apart(y: Tensor, x: Tensor) -> Tensor:
        first, *_, last = x.unbind(-2)
        return y * first.unsqueeze(-2) + last.detach().unsqueeze(-2) * y.split(1, -2)[-1]

    wrapped = compare(apart, _lengths((2, 3), (4, 3), (2, 4)))
    text = wrapped.graph("captured")
    assert "Sequence" not in text and "ATen" not in text


NOTHING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "chunk": lambda y, x: y.chunk(1, 0)[0] * 2,
    "split": lambda y, x: y[:, :0].split(1, 1)[0].sum() + y,
    "roll": lambda y, x: y.roll(2, 0) + y[:, :0].roll(1, 1).sum(),
    "reshape": lambda y, x: y.transpose(0, 1).reshape(x.shape) * x,
    "interpolate": lambda y, x: F.interpolate(y.mT, scale_factor=2, mode="linear") * x.sum(),
    "mean over an axis without places": lambda y, x: F.rms_norm(y[..., :0], (0,)).sum() + y,
    "attention": lambda y, x: F.scaled_dot_product_attention(y[:, None], x[:, None], x[:, None])[:, 0],
    "attention to nothing": lambda y, x: (
        F.scaled_dot_product_attention(y[:, None], x[:, None, :0], x[:, None, :0])[:, 0] + y
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_later_batch_is_empty(name: str) -> None:
    compare(NOTHING[name], _lengths((1, 5), (2, 5), (0, 5), (2, 5)))


MEETING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an axis of 1": lambda y, x: torch.lerp(y, x[x > 0], 0.3),
    "the same once more": lambda y, x: torch.addcmul(y, x[x > 0], x[x > 0]),
    "a number": lambda y, x: y.sum() * x[x > 0] * x[x > 0],
}


@pytest.mark.parametrize("name", MEETING)
def test_sizes_that_content_decides_meet_others(name: str) -> None:
    wrapped, eager = pair(Calls(MEETING[name]).double())
    for rows in (2, 3, 1):
        given = (torch.randn(rows, 1), torch.randn(4, 5))
        same_step(wrapped, eager, *(t.double().requires_grad_() for t in given))


def _written_after_strides(y: Tensor, x: Tensor) -> Tensor:
    found = y[x[:, 0] > 0]
    read = found.t().as_strided((2,), (1,))
    found.mul_(2)
    return read


ARRANGED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "strides": lambda y, x: y[(x.abs() > -1).nonzero(as_tuple=True)].as_strided((3,), (1,)),
    "strides of what is written to": _written_after_strides,
    "strides of an expanded column": lambda y, x: y[x[:, 0] > 0][:, :1].expand(-1, 3).as_strided((2,), (1,)),
    "pixels": lambda y, x: F.pixel_shuffle(y[x[:, 0] > 0].view(-1, 4, 1, 1), 2),
    "pixels apart": lambda y, x: F.pixel_unshuffle(y[x[:, 0] > 0].view(-1, 1, 2, 2), 2),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_what_content_chose_is_arranged_anew(name: str) -> None:
    wrapped, eager = pair(Calls(ARRANGED[name]).double())
    for rows in (5, 7, 4):
        x = torch.randn(rows, 4).double()
        x[0, 0] = 1
        same_step(wrapped, eager, torch.randn(rows, 4).double().requires_grad_(), x)


COUNTED: dict[str, Callable[[Tensor], int]] = {
    "bins": lambda ids: torch.bincount(ids.flatten()).shape[0],
    "at least some bins": lambda ids: ids.flatten().bincount(minlength=6).numel(),
    "bins with weights": lambda ids: torch.bincount(ids.flatten(), ids.flatten().double(), 4).shape[0],
    "distinct": lambda ids: torch.unique(ids).shape[0],
    "places": lambda ids: ids.nonzero().shape[0],
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_size_that_content_decides_is_a_key(name: str) -> None:
    table: dict[int, float] = {}

    def scaled(x: Tensor, ids: Tensor) -> Tensor:
        return x * table.setdefault(COUNTED[name](ids), COUNTED[name](ids) / 2)

    wrapped, eager = pair(Calls(scaled).double())
    for largest in (3, 5, 9, 3, 9):
        given = (torch.randn(3, 4).double().requires_grad_(), torch.randint(0, largest, (3, 4)))
        same_step(wrapped, eager, *given)


def test_the_last_of_what_was_rolled_where_there_is_one() -> None:
    compare(WRITTEN["the last of what was rolled"], _lengths((2, 1), (2, 3), (3, 1)))


def _numbered(x: Tensor, classes: int) -> Tensor:
    return F.one_hot(torch.zeros(2, dtype=torch.long), classes).to(x.dtype)


LIMITED: dict[str, Callable[[Tensor, Tensor], Any]] = {  # numbers that are the same for all sizes from 2 on
    "steps": lambda y, x: y.sum() * torch.linspace(0, 1, min(8, 4 * x.shape[1]), dtype=x.dtype),
    "steps of two sizes": lambda y, x: (
        y.sum() * torch.linspace(0, 1, min(8, 2 * x.shape[0] * x.shape[1]), dtype=x.dtype)
    ),
    "steps by a branch": lambda y, x: y.sum() * torch.linspace(0, 1, 4 if x.shape[1] > 1 else 2, dtype=x.dtype),
    "classes": lambda y, x: y.sum() * _numbered(x, torch.sym_min(8, 4 * x.shape[1])),
    "a length": lambda y, x: y.sum() * x.new_ones(max(2, 4 - (x.shape[1] == 1) * 2)),
    "places": lambda y, x: y.sum() * torch.arange(min(8, 4 * x.shape[1])),
    "a factor": lambda y, x: y * min(8, 4 * x.shape[1]),
    "an end": lambda y, x: y.repeat(1, 9, 1)[:, : min(8, 4 * x.shape[1])],
    "a count of the largest": lambda y, x: y.repeat(1, 9, 1).topk(min(8, 4 * x.shape[1]), 1)[0],
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_number_that_is_another_for_a_size_of_1(name: str) -> None:
    for sizes in (((2, 1), (2, 3), (3, 1)), ((2, 3), (2, 1), (1, 1))):
        compare(LIMITED[name], _lengths(*sizes))


class _Fixed(torch.nn.Module):
    """A layer makes the last axis 4 at every size; what is squeezed of it stays."""

    def __init__(self, squeezed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.squeezed = torch.nn.Linear(3, 4), squeezed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return self.squeezed(y), y


def _squeezed_and_written(y: Tensor) -> Tensor:
    part = y.squeeze(2)
    part.diagonal(0, -1, -2).fill_(0.5)
    return part.squeeze_(-1)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "reference"])
@pytest.mark.parametrize(
    "squeezed",
    [
        lambda y: y.squeeze(2).diagonal(0, 1, 2) * 2,
        lambda y: y.squeeze(-1).mT + y.squeeze((0, 2)).mT,
        lambda y: torch.squeeze(y, 2).sum(2),
        _squeezed_and_written,
    ],
)
def test_an_axis_that_is_never_1_is_not_squeezed(squeezed: Callable[[Tensor], Tensor], backend: str) -> None:
    eager = _Fixed(squeezed)
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(backend=backend, summary=False))
    for batch, length in ((2, 5), (3, 1), (2, 4)):
        x = torch.randn(batch, length, 3)
        for module in (wrapped, eager):
            sum(t.square().sum() for t in module(x)).backward()
        for ours, theirs in zip(wrapped(x), eager(x), strict=True):
            torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(wrapped.layer.weight.grad, eager.layer.weight.grad)


def test_an_axis_is_squeezed_only_where_it_is_1() -> None:
    for squeeze in (
        lambda y: y.squeeze(1),
        lambda y: y.squeeze((0, 1)),
        lambda y: y.clone().squeeze_(1),
        Tensor.squeeze,
    ):
        compare(lambda y, x, squeeze=squeeze: squeeze(y), _lengths((2, 1), (2, 3), (2, 1), (1, 1), (1, 3)))


@functools.lru_cache
def _quotient(size: int, parts: int) -> int:
    return size // parts


def _known_quotient(size: int, parts: int) -> int:
    """As einops looks it up, which is prepared for sizes that are symbols."""
    try:
        return _quotient(size, parts)
    except TypeError:
        return _quotient.__wrapped__(size, parts)


def test_sizes_that_are_no_keys_need_one_graph() -> None:
    halves = lambda y, x: y.unflatten(1, (2, _known_quotient(y.shape[1], 2))).sum(2)  # noqa: E731
    wrapped = compare(halves, _lengths((2, 4), (3, 6)))
    assert captures(wrapped) == 1


def test_sizes_in_tensors_need_one_graph() -> None:
    """They are computed from the sizes: no size is a guard."""
    for name in ("as_tensor", "new_tensor", "tensor", "repeat_interleave", "full"):
        wrapped = compare(WRITTEN[name], _lengths(*SEQUENCES))
        assert len(wrapped.__dict__["_ort_sessions"].entries) == 1, name


def test_numbers_made_of_sizes_are_float64() -> None:
    """As Python's are: in float32 a large one would be another."""
    compare(lambda y, x: y * (x.shape[1] * 1e9 + 1.0), _lengths(*SEQUENCES))


@functools.singledispatch
def _is_number(value: object) -> bool:
    return False


@_is_number.register
def _(value: int) -> bool:
    return True


def _matched(n: int) -> bool:
    match (n, {"half": n / 2}):
        case (8 | 4, _):
            return False
        case (int(), {"half": float(half)}) if half > 4:
            return True
    return n == 5


ASKED: dict[str, Callable[[int], bool]] = {
    "matched": _matched,
    "dispatched": lambda n: _is_number(n) and _is_number(n > 8) and not _is_number(n / 2) and n > 8,
    "of this class": lambda n: n.__class__ is int and (n / 2).__class__ in (float,) and n > 8,
    "is true": lambda n: (n > 8) is True or ((n == 5) is not False),
    "kept before it is asked": lambda n: [flag for flag in [n > 8, n < 5] if flag is True] != [],
    "as a truth value of a table": lambda n: {True: 1, False: 2}[n > 5] == 2,
    "equal": lambda n: n == 8,
    "not equal": lambda n: n != 8,
    "equal to a multiple": lambda n: 8 * (n // 4) == 8,
    "divided without a remainder": lambda n: n % 4 == 0,
    "one of": lambda n: n in (4, 8),
    "in a table": lambda n: bool({5: True, 12: True}.get(n)),
    "a power of two": lambda n: n & (n - 1) == 0,
    "longer": lambda n: n > 8,
    "between": lambda n: 5 < n <= 8,
    "of a float": lambda n: n / 2 == 4.0,
    "of a square root": lambda n: int(math.sqrt(n)) ** 2 == n,
    "as a key": lambda n: (n, 2) in {(8, 2): 1},
    "as a text": lambda n: len(str(n)) == 1 and f"{n}x2" != "8x2",
    "as a formatted text": lambda n: f"{n:03d} {n / 2:.1f}" == "008 4.0",
    "is a number": lambda n: isinstance(n, int) and isinstance(n, numbers.Integral) and n > 8,
    "is no other": lambda n: not isinstance(n, (str, torch.Tensor)) and isinstance(n, torch.SymInt | int) and n > 8,
    "of this type": lambda n: type(n) is int and type(n / 2) is float and type(n > 8) is bool and n > 8,
    "of a type that is a type": lambda n: isinstance(int, type) and type("Name", (), {}).__name__ == "Name" and n > 8,
    "is a float": lambda n: isinstance(n / 2, float) and isinstance(n > 8, bool) and n > 8,
    "divided with its remainder": lambda n: divmod(n, 3) == (2, 2) or divmod(17, n) == (3, 2),
    "inverted": lambda n: ~n == -9,
    "a power of a remainder": lambda n: pow(n, 2, 5) == 0,
    "a whole number": lambda n: (n / 8).is_integer(),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("sizes", [(5, 8, 5, 12, 4), (8, 5, 8, 12, 4)], ids=str)
def test_a_branch_on_a_size_goes_as_in_eager_whichever_way_it_went_first(name: str, sizes: tuple[int, ...]) -> None:
    compare(lambda y, x: 2 * y if ASKED[name](x.shape[1]) else y + 1, _lengths(*((2, size) for size in sizes)))


def test_a_size_is_of_its_type_where_a_number_is_looked_at() -> None:
    class Asking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            n = x.shape[1]
            is_number = type(n) is int and type(n / 2) is float and type(n) in {int: 1}
            return x * (2 if is_number else 3), int(x.detach().sum() > 0)

    wrapped, eager = pair(Asking())
    for step, size in enumerate((5, 5, 8, 7, 8)):
        x = torch.ones(2, size, requires_grad=True) * (-1) ** step
        (a, m), (b, n) = wrapped(x), eager(x)
        assert a.equal(b) and m == n, step


def test_a_branch_of_a_layer_of_torch_on_a_size() -> None:
    """Of one sample batch normalization of torch has no variance, and says so; of others it has."""
    layer = torch.nn.BatchNorm1d(4, dtype=torch.float64)
    module = ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64), layer))
    module(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(CaptureError, match="more than 1 value per channel"):
        module(torch.randn(1, 4, dtype=torch.float64))


COMPUTED: dict[str, Callable[[int], Any]] = {
    "and": lambda n: n & 3,
    "or": lambda n: (n | 1) + (2 | n),
    "exclusive or": lambda n: n ^ 2,
    "shifted": lambda n: (n << 1) + (n >> 1) + (1 << n),
    "inverted": lambda n: ~n,
    "quotient and remainder": lambda n: divmod(n, 3)[1] + divmod(17, n)[0],
    "quotient of a difference": lambda n: (n - 10) // 3,
    "quotient by a negative number": lambda n: n // -2,
    "remainder of a difference": lambda n: (n - 10) % 3 + n % -3,
    "remainder of floats": lambda n: n % 2.5 + 7.5 % n + (n / 2) % 2,
    "float of a remainder": lambda n: torch.tensor(float(n % 2.5), dtype=torch.float64),
    "rounded": lambda n: round(n / 3) + round(n / 3, 1),
    "rounded down and up": lambda n: math.floor(n / 3) + math.ceil(n / 3) + math.trunc(n / 3),
    "roots and logarithms": lambda n: math.sqrt(n) + n**0.5 + math.log2(n) + math.isqrt(n),
    "powers": lambda n: n**2 + 2**n + 1.5**n + n**-1 + pow(n, 2, 5),
    "of numpy": lambda n: float(np.sqrt(n)) + float(np.prod([n, 2])),
    "of truth values": lambda n: float(n > 6) + [1, 2][n > 6] + ((n > 4) & (n < 7)) * 2,
    "of a whole number": lambda n: 1 + (n / 2).is_integer(),
    "common divisor": lambda n: math.gcd(n, 4) + math.factorial(n) + n.bit_length(),
    "extremes": lambda n: min(n, 6) + max(n, 6) + abs(n - 6) + sorted((n, 6))[0],
    "absolute": lambda n: abs(n - 7) - n,
    "parts": lambda n: n.real + n.imag + n.numerator / n.denominator + n.conjugate(),
    "bytes": lambda n: int.from_bytes(n.to_bytes(2, "big"), "big") + n.bit_count(),
    "a method of the type": lambda n: int.__add__(n, 1),
    "fractions": lambda n: float(fractions.Fraction(n, 3)),
    "of truth values by bits": lambda n: ((n > 4) | (n < 2)) + ((n > 4) ^ (n < 7)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_numbers_made_of_sizes_are_pythons(name: str) -> None:
    compare(lambda y, x: y * COMPUTED[name](x.shape[1]), _lengths(*((2, size) for size in (5, 8, 5, 3))))


TYPED = """
import torch
from onnxtrain import ORTModule

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
    def forward(self, x):
        return (x * self.weight).sum() if x.shape[0] != 8 and isinstance(x.shape[0], int) else self.weight * 100

module = ORTModule(Branches())

print([module(torch.ones(n)).item() for n in (5, 8, 3)])
"""


@pytest.mark.parametrize("where", ["file", "command", "input", "prompt"])
def test_code_that_is_in_no_file_asks_as_other_code_does(where: str, tmp_path) -> None:
    path = tmp_path / "branches.py"
    path.write_text(TYPED)
    arguments = {"file": [str(path)], "command": ["-c", TYPED], "input": ["-"], "prompt": ["-i"]}[where]
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, input=TYPED, capture_output=True, text=True, timeout=600, check=True)
    assert "[5.0, 100.0, 3.0]" in ran.stdout, ran.stdout + ran.stderr


SMALL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "more than one": lambda y, x: y if x.shape[0] > 1 else 2 * y,
    "twice as many": lambda y, x: y if 2 * x.shape[0] > 3 else 2 * y,
    "remainder of less than none": lambda y, x: y if (x.shape[0] - 2) % 2 else 2 * y,
    "remainder of a division": lambda y, x: y if x.shape[0] // 2 % 2 else 2 * y,
    "any": lambda y, x: y.sum(0) if x.shape[0] else y.sum() + 3,
    "at least two": lambda y, x: y * max(x.shape[0], 2),
    "slice that reaches beyond the end": lambda y, x: y[:2].cumsum(0) * y[:2].shape[0],
    "slice from the end": lambda y, x: y[-2:].cumsum(0) * y[-2:].shape[0],
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("sizes", [(3, 1, 0, 4), (1, 3, 0), (0, 2, 1)], ids=str)
def test_what_is_asked_of_sizes_may_be_otherwise_of_1_and_of_none(name: str, sizes: tuple[int, ...]) -> None:
    """torch takes a symbol to be 2 or more, and keeps no note of what it answers because of that."""
    compare(SMALL[name], _lengths(*((size, 3) for size in sizes)))


def test_a_size_that_is_made_of_a_size_of_1() -> None:
    """Captured as if it were larger, it may be equal to what another size is a multiple of."""
    compare(lambda y, x: y.reshape(-1, 2 * x.shape[0]).cumsum(0), _lengths((6, 6), (1, 8), (2, 5)))


def test_a_size_that_is_1_where_memory_was_asked_for_is_another_later() -> None:
    class Pooled(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = F.lp_pool1d(x.abs() + 1, 2, 2)
            part = made[-x.shape[0] :]
            made += 0.1
            return made.swapaxes(0, 0), part

    wrapped, eager = pair(Pooled())
    for rows, size in ((1, 2), (3, 4), (2, 7), (1, 3)):
        same_step(wrapped, eager, torch.randn(rows, 3, size, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("index", ["tensor", "list", "beside", "flags"])
def test_a_value_with_axes_of_1_too_many_is_written(index: str) -> None:
    class Placed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = x.new_zeros(2, x.shape[1], 4)
            if index == "tensor":
                made[x[0].argmax(-1).clamp(max=1)[:1], 0] = x[None, :, 0]
            elif index == "list":
                made[0][list(range(2))] = x[None, :, :2] * 2
            elif index == "beside":
                made[1, torch.arange(x.shape[1])] = x
            else:
                made[0][torch.arange(x.shape[1]) >= 0] = x[None]
            return made * made

    wrapped, eager = pair(Placed())
    for size in (5, 2, 3):
        same_step(wrapped, eager, torch.randn(1, size, 4, dtype=torch.float64, requires_grad=True))


def test_what_the_translation_alone_asks_of_a_size_of_1() -> None:
    """What is written in place has its size already; what returns it asks whether a quarter of the size is 1."""
    wrapped, eager = pair(Written(_quarter_doubled))
    for size, graphs in ((1, 1), (1, 1), (2, 2), (5, 2), (1, 2)):
        same_step(wrapped, eager, torch.randn(2, size, 4, dtype=torch.float64))
        assert captures(wrapped) == graphs


def _quarter_doubled(y: Tensor, x: Tensor) -> Tensor:
    z = y.clone()
    z[:, : x.shape[1] // 4].mul_(2)
    return y + z


class Means(torch.nn.Module):
    """Statistics of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1) + x.var(-1, correction=0) + F.layer_norm(x, (4,)).sum(-1)


class Halved(torch.nn.Module):
    """Half of a size is told by floating-point numbers; what torch makes of it is computed with."""

    def forward(self, x: Tensor) -> Tensor:
        most = F.interpolate(x, scale_factor=0.5, mode="bicubic").mode(3).values
        return F.cosine_similarity(most, most.flip(1), 0)


def test_a_size_that_has_no_formula() -> None:
    wrapped, eager = pair(Halved())
    for size in ((4, 2, 4, 5), (5, 2, 4, 8), (2, 2, 2, 2)):
        same_step(wrapped, eager, torch.randn(size, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "reference"])
def test_means_of_no_rows(backend: str) -> None:
    wrapped, eager = pair(Means(), backend=backend)
    for rows in (0, 3):
        same_step(wrapped, eager, torch.randn(rows, 4, requires_grad=True))


def test_what_the_reference_backend_returns_lies_in_order() -> None:
    class Turned(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flip(1)

    wrapped, eager = pair(Turned(), backend="reference")
    for size in (3, 5):  # torch ends the process where DLPack gives it negative strides
        x = torch.randn(2, size)
        assert torch.equal(wrapped(x), eager(x)), size


def test_bfloat16_of_the_reference_backend() -> None:
    class Rounded(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16().cumsum(-1)

    wrapped, eager = pair(Rounded(), backend="reference")
    same_step(wrapped, eager, torch.ones(2, 3, requires_grad=True))


def _filled(place: slice) -> Callable[[Tensor, Tensor], Tensor]:
    def fill(y: Tensor, mask: Tensor) -> Tensor:
        found = y[mask]
        found[place] = 2.0
        return found

    return fill


def _filled_flat(y: Tensor, mask: Tensor) -> Tensor:
    found = y[mask]
    found.view(-1)[:3] = 0
    return found


FOUND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # torch takes the first of what is found for one
    "the first is written": _filled(slice(0, 1)),
    "the last is written": _filled(slice(-1, None)),
    "some places are written": _filled_flat,
    "how many are first": lambda y, mask: y * y[mask][:1].shape[0],
    "the sum of the first": lambda y, mask: y[mask][:1].sum(0),
    "the first place": lambda y, mask: y[mask.nonzero().squeeze(1)[:1]],
    "the last beside others": lambda y, mask: torch.cat([y[mask][-1:], y]),
    "the first, flat": lambda y, mask: y[mask][:1].flatten(),
    "the first, repeated": lambda y, mask: y[mask][:1].repeat(3, 1),
    "a product of the first": lambda y, mask: y[mask][:1].t() @ y[mask][:1],
}


@pytest.mark.parametrize("name", [*FOUND][3:] if BEFORE_2_12 else FOUND)  # it refuses to write to what it finds
def test_the_first_of_what_is_found_where_nothing_is(name: str) -> None:
    wrapped, eager = pair(Calls(FOUND[name]).double())
    for mask in ([True, False, True], [False] * 3, [False, False, True]):
        same_step(wrapped, eager, torch.randn(3, 4).double().requires_grad_(), torch.tensor(mask))


def _half_of_half(x: Tensor) -> Tensor:
    half = x.chunk(2)[1]
    return (half[:, 1:] * half[:, :-1]).chunk(2)[-1]


def _in_two_ways(x: Tensor) -> Tensor:
    y = x[1:] * x[:1]
    return y * 2 if x.shape[0] - 1 == 1 else y * 3


@pytest.mark.parametrize("function", [_half_of_half, _in_two_ways, lambda x: torch.trapz(x[1:] * 2, dim=-2)])
def test_what_broadcasting_has_asked_decides_where_it_is_asked_again(function: Any) -> None:
    for sizes in ((4, 2, 3, 1, 6), (1, 4, 2), (2, 5, 1)):
        ours, eager = pair(Applied(function))
        for rows in sizes:
            x = torch.randn(rows, 5)
            if function is _half_of_half and rows == 1:
                continue
            torch.testing.assert_close(ours(x), eager(x))
