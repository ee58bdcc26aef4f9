"""Which sizes stay symbols while a module is traced."""

from __future__ import annotations

import builtins
import copy
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import captures

from onnxtrain import ORTModule
from onnxtrain.capture import capture
from onnxtrain.errors import CaptureError
from onnxtrain.ir import shapes


class Contrast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x) @ x.T
        return F.cross_entropy(logits, torch.arange(len(logits))) / len([x, x])


class Windows(torch.nn.Module):
    """Pads images to whole windows, then to whole windows no larger than the image, as many times as asked."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = 4
        for _ in range(self.times):
            height, width = x.shape[2:]
            x = F.pad(x * self.scale, (0, -width % window, 0, -height % window))
            window = min(x.shape[2:]) // 2 + 1
        return (x.flatten(1) ** 2).mean()


class Chooses(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[: 1 if x.sum() > 0 else 2]


def dims_of(module: torch.nn.Module, x: torch.Tensor) -> list[int | str]:
    graph = capture(module, (x,), {}).graph.model.graph
    return [d if isinstance(d, int) else str(d.value) for d in shapes.known_dims(graph.inputs[0])]


def check(eager: torch.nn.Module, batches: list[torch.Tensor], graphs: int) -> None:
    wrapped = ORTModule(copy.deepcopy(eager))
    for x in batches:
        losses = [m(x) for m in (wrapped, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert captures(wrapped) == graphs


def test_len_of_a_tensor_is_a_symbol() -> None:
    assert dims_of(Contrast(), torch.randn(3, 4)) == ["x_dim0", 4]
    check(Contrast(), [torch.randn(rows, 4) for rows in (3, 5, 1)], graphs=1)


def test_len_is_pythons_own_afterwards() -> None:
    plain = builtins.len
    capture(Contrast(), (torch.randn(3, 4),), {})
    with pytest.raises(CaptureError):
        capture(Chooses(), (torch.randn(3, 4),), {})
    assert builtins.len is plain


def test_padding_to_whole_windows_stays_dynamic() -> None:
    assert dims_of(Windows(1), torch.randn(2, 3, 7, 9)) == ["x_dim0", "x_dim1", "x_dim2", "x_dim3"]
    check(Windows(1), [torch.randn(b, 3, h, w) for b, h, w in ((2, 7, 9), (1, 8, 6), (3, 5, 11))], graphs=1)


def test_sizes_that_outgrow_sympy_become_constants_and_the_batch_does_not() -> None:
    assert dims_of(Windows(3), torch.randn(2, 3, 7, 9)) == ["x_dim0", "x_dim1", 7, 9]
    check(Windows(3), [torch.randn(b, 3, 7, w) for b, w in ((2, 9), (1, 9), (3, 9), (3, 8))], graphs=2)


def test_a_constant_axis_of_size_one_keeps_its_size() -> None:
    assert dims_of(Windows(3), torch.randn(1, 3, 1, 9)) == ["x_dim0", "x_dim1", 1, 9]


class Patches(torch.nn.Module):
    """Asks of sizes what no solver of inequalities solves, as strided patches of patches do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.unflatten(1, (-1, 8)).mean(2) * self.scale
        return (patches * (2.0 if 8 * (patches.shape[1] // 4) == 8 else 3.0)).sum()


def test_a_condition_that_sympy_cannot_solve_is_a_guard() -> None:
    assert dims_of(Patches(), torch.randn(2, 32)) == ["x_dim0", "x_dim1"]
    check(Patches(), [torch.randn(b, w) for b, w in ((2, 32), (1, 32), (3, 40), (3, 64), (2, 32))], graphs=2)


class Parts(torch.nn.Module):
    """Takes off the first token, whose number is known, from the others, whose number is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, others = self.linear(x).split([1, x.shape[1] - 1], 1)
        return (first * others).sin().mean()


def test_parts_of_sizes_that_are_symbols() -> None:
    assert dims_of(Parts(), torch.randn(2, 5, 4)) == ["x_dim0", "x_dim1", 4]
    check(Parts(), [torch.randn(b, n, 4) for b, n in ((2, 5), (3, 7), (1, 2))], graphs=1)


def test_an_example_that_cannot_be_larger_fails_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is tried; torch logs what the first raised."""
    told: list[logging.LogRecord] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record)

    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(1, 3)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, Told()])
    captured = capture(Product(), (torch.ones(4, 1),), {})
    assert shapes.dims_of(captured.graph.model.graph.inputs[0])[1] == 1  # type: ignore[index]
    assert not told and logger.getEffectiveLevel() <= logging.ERROR


class Largest(torch.nn.Module):
    """Compares a size with 2, which each symbol is taken to be, where torch.export stands in for Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        scale = max(y.shape, default=1) + min((y.shape[0], 0), (1, 5))[1]
        return (y * scale).sum()


@pytest.mark.parametrize("rows", [(1, 3, 2), (3, 1, 2)])
def test_the_largest_of_sizes_of_which_one_is_1(rows: tuple[int, ...]) -> None:
    check(Largest(), [torch.randn(count, 4) for count in rows], graphs=2)


class CountedParts(torch.nn.Module):
    """Takes the first of some parts, which bounds the size, by a number that within the bounds is always the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.split(3)[0] * int((x.shape[0] + 1) // 2**0.5)


def test_a_number_that_is_the_same_for_all_sizes_but_1() -> None:
    wrapped = ORTModule(CountedParts())
    for count in (2, 1, 3):
        x = torch.randn(count, 4)
        assert torch.equal(wrapped(x), CountedParts()(x))
    assert captures(wrapped) == 2


CUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the first": lambda y: y[1:].sum(1),
    "the last": lambda y: y[:-1].flatten(),
    "either end": lambda y: (y[:-1] - y[1:]).square(),
    "joined": lambda y: torch.cat([y[:-1], y[1:]]),
    "repeated": lambda y: y[None, :-1].repeat(2, 1, 1),
    "no more than one": lambda y: y[:1] * 2 + y[-1:].sum(),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_off_of_a_selection_of_nothing(name: str) -> None:
    """Symbols are positive, but not those that content decides on."""

    class Selects(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4))

        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return CUT[name]((x * self.weight)[chosen])

    wrapped, eager = ORTModule(Selects()), Selects()
    for count in (2, 0, 1, 3):
        results = []
        for module in (wrapped, eager):
            x = torch.arange(12.0).view(3, 4).requires_grad_()
            y = module(x, torch.arange(3) < count)
            (y * 2).sum().backward()
            results.append((y, x.grad, next(module.parameters()).grad))
        torch.testing.assert_close(*results)
    assert captures(wrapped) == 1
