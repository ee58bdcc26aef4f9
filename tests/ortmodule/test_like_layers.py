"""Layers that are alike: four of them are traced, and what is built of these is what all of them compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from onnxtrain import Options, ORTModule, compiler
from onnxtrain.capture import Answers, like_layers
from onnxtrain.compiler import Report, capture_module
from onnxtrain.ir.layers import NotRepeatedError
from tests.parity import captures, pair, same_step

COUNT, WIDTH = 8, 6
SHAPES = ((5, 4), (3, 4), (1, 4))


class Block(nn.Module):
    """A layer with a number of its own, which it does not read."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers one after the other, between others."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(4, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def blocks(kind: Callable[[int], nn.Module] = Block, count: int = COUNT) -> list[nn.Module]:
    """Layers of a kind, each made with its number."""
    return [kind(number) for number in range(count)]


def rows(wrapped: ORTModule) -> int:
    """How many rows of layers of the first graph had stand-ins."""
    return len(wrapped.__dict__["_ort_sessions"].entries[0].session.bound.report.layers)


def check(module: nn.Module, expected: int) -> ORTModule:
    """Train a step of a module at several sizes beside eager PyTorch; whether its layers had stand-ins."""
    wrapped, eager = pair(module.double())
    for shape in SHAPES:
        same_step(wrapped, eager, torch.randn(shape, dtype=torch.float64))
    assert rows(wrapped) == expected
    return wrapped


def test_a_number_that_nobody_reads_is_no_difference() -> None:
    wrapped = check(Stack(blocks()), 1)
    assert captures(wrapped) == 1


class ReadsNumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


class Alternates(Block):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.window = 2 + number % 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(self.window, 1)


class Rate(Block):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.rate = number / 10

    def forward(self, x: Tensor) -> Tensor:
        return x + (super().forward(x) - x) * (1 - self.rate)


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class Shared(Block):
    TABLE = nn.Linear(WIDTH, WIDTH)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.table = self.TABLE

    def forward(self, x: Tensor) -> Tensor:
        return self.table(super().forward(x))


def counting() -> Callable[[int], nn.Module]:
    """Layers that count their calls in a closure, and compute by that."""
    calls = [0]

    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] = calls[0] % COUNT + 1
            return super().forward(x) * calls[0]

    return Counts


_SCALE = 1.0


def scaling() -> Callable[[int], nn.Module]:
    """Layers that set a global number for the one after."""

    class Scales(Block):
        def forward(self, x: Tensor) -> Tensor:
            global _SCALE
            made = super().forward(x) * _SCALE
            _SCALE = _SCALE % COUNT + 1
            return made

    return Scales


class Settings:
    """What layers read, and others set."""

    scale = 1.0


_SETTINGS = Settings()


class ReadsGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _SETTINGS.scale * _SCALE


class SetsAttribute(Stack):
    """A global object has another attribute for one layer in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            _SETTINGS.scale = 3.0 if place == 5 else 1.0
            x = layer(x)
        return self.last(x)


class SetsGlobal(Stack):
    """A global number is another one for one layer in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        global _SCALE
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            _SCALE = 3.0 if place == 5 else 1.0
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("kind", [SetsAttribute, SetsGlobal], ids=lambda k: k.__name__)
def test_what_one_layer_alone_reads(kind: type[Stack]) -> None:
    check(kind(blocks(lambda number: ReadsGlobal(number))), 0)


@pytest.mark.parametrize("kind", [ReadsNumber, Alternates, Rate, Shared, Keeps], ids=lambda k: k.__name__)
def test_layers_that_differ_are_all_traced(kind: type[Block]) -> None:
    check(Stack(blocks(kind)), 0)


@pytest.mark.parametrize("kind", [counting, scaling])
def test_layers_that_count_are_all_traced(kind: Callable[[], Callable[[int], nn.Module]]) -> None:
    module = Stack(blocks(kind())).double()
    wrapped = ORTModule(module)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(2):  # the first call of some sets what they count
        torch.testing.assert_close(wrapped(x), module(x))
    assert rows(wrapped) == 0


class Hands(Stack):
    """The layers write into a list that the whole gives them."""

    def __init__(self) -> None:
        super().__init__(blocks())
        self.scales: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.first(x), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x.mean())
        return self.last(x) + torch.stack(seen).sum()


class Chooses(Stack):
    """One layer in the middle is called in another way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            x = layer(x * 2) if place == 5 else layer(x)
        return self.last(x)


class Reads(Stack):
    """What a layer in the middle gives is read at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.first(x), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return self.last(x + seen[4])


class ReadsThird(Reads):
    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.first(x), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return self.last(x + seen[2])


class ReadsFirst(Reads):
    def forward(self, x: Tensor) -> Tensor:
        x = first = self.layers[0](self.first(x))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.last(x + first)


class Weighs(Stack):
    """All weights are summed up within the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.layers.parameters())


class WeighsParts(Stack):
    def forward(self, x: Tensor) -> Tensor:
        found = [m.weight.square().sum() for m in self.modules() if isinstance(m, nn.Linear)]
        return super().forward(x) + sum(found)


class LooksInside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.layers[5].up.weight.mean()


class Twice(Stack):
    """The layers are called twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.last(x)


class Backwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.last(x)


class Skips(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.last(x)


class Straight(Stack):
    """The layers' forward is called, not they."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer.forward(x)
        return self.last(x)


class ThroughNone(Stack):
    """Gradients are switched off for one layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            with torch.set_grad_enabled(place != 5):
                x = layer(x)
        return self.last(x)


class Doubles(Stack):
    """What a layer gives is changed in place before the next one has it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5)
        return self.last(x)


class Shifts(Stack):
    """What all layers are given is changed in place between two of them."""

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.first(x), torch.zeros_like(x[:, :1])
        for layer in self.layers:
            x = layer(x + shift)
            shift.add_(0.5)
        return self.last(x)


class Detaches(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            x = layer(x.detach() if place == 4 else x)
        return self.last(x)


class Toggles(Stack):
    """One layer runs in another mode."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            layer.train(place != 5)
            x = layer(x)
        return self.last(x)


WHOLES = (
    Hands,
    Doubles,
    Shifts,
    Detaches,
    Toggles,
    Chooses,
    Reads,
    ReadsThird,
    Weighs,
    WeighsParts,
    LooksInside,
    Twice,
    Backwards,
    Straight,
    ThroughNone,
)


@pytest.mark.parametrize("kind", [*WHOLES, Skips], ids=lambda k: k.__name__)
def test_layers_that_are_used_in_another_way_are_all_traced(kind: type[Stack]) -> None:
    check(kind() if kind is Hands else kind(blocks()), 0)


def test_what_the_first_layer_gives_may_be_read_at_the_end() -> None:
    check(ReadsFirst(blocks()), 1)


def test_layers_in_a_sequential() -> None:
    check(nn.Sequential(nn.Linear(4, WIDTH), *blocks(count=9), nn.Linear(WIDTH, 2)), 1)


def test_layers_that_are_frozen_are_a_row_of_their_own() -> None:
    module = Stack(blocks(count=13))
    for layer in module.layers[:6]:
        layer.requires_grad_(False)
    check(module, 2)


def test_a_hook_on_one_layer_breaks_the_row() -> None:
    module = Stack(blocks())
    module.layers[4].up.register_forward_hook(lambda part, args, result: result * 2)
    check(module, 0)


def test_layers_with_buffers() -> None:
    class Buffered(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift  # type: ignore[operator]

    check(Stack(blocks(Buffered)), 1)


def test_layers_that_write_their_buffers_are_all_traced() -> None:
    class Normalizes(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]

    wrapped, eager = pair(Stack(blocks(Normalizes)).double())
    for shape in SHAPES[:2]:
        same_step(wrapped, eager, torch.randn(shape, dtype=torch.float64))
    assert rows(wrapped) == 0


def test_a_row_after_another() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Stack(blocks()), Stack(blocks(count=7))

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.other(x)

    check(Both(), 2)


class Normed(Stack):
    """A stack whose last layer's result is looked at by what comes after it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), self.last)


JOINS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda one, other: one + other,
    "sum of one that is cut": lambda one, other: one + other.relu(),
    "product": lambda one, other: one * other,
    "side by side": lambda one, other: torch.cat([one, other], 1),
    "one that nothing depends on": lambda one, other: one + 0 * other.detach(),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("kinds", [(Stack, Stack), (Stack, Normed), (Normed, Stack), (Normed, Normed)])
def test_a_row_beside_another(kinds: tuple[type[Stack], type[Stack]], join: str) -> None:
    """Of either the backward pass may begin with what depends on none of its layers."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = kinds[0](blocks()), kinds[1](blocks(count=7))

        def forward(self, x: Tensor) -> Any:
            return JOINS[join](self.one(x), self.other(x))

    wrapped = check(Both(), 2)
    compiled = wrapped.__dict__["_ort_sessions"].entries[0].session.bound.latest
    assert compiled.training is not None and len(compiled.training.layers) == 2


def _numbered(source: str) -> list[str]:
    """A program whose names are numbered in their order."""
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"v{len(names)}")

    return [re.sub(r"\b[a-z_]\w*", number, line.partition("#")[0]) for line in source.splitlines()]


def _programs(module: nn.Module, least: int) -> list[list[str]]:
    """The source of both passes."""
    wrapped = ORTModule(module)
    with mock.patch.object(like_layers, "LEAST", least):
        wrapped(torch.randn(5, 4)).square().sum().backward()
    return [_numbered(wrapped.source(which)) for which in ("forward", "backward")]


def test_the_program_is_that_of_all_layers() -> None:
    module = Stack(blocks(count=10))
    assert _programs(module, like_layers.LEAST) == _programs(module, 10**9)


def test_the_training_graph_is_of_all_layers() -> None:
    wrapped = ORTModule(Stack(blocks(count=10)))
    wrapped(torch.randn(5, 4)).square().sum().backward()
    compiled = wrapped.__dict__["_ort_sessions"].entries[0].session.bound.latest
    assert compiled.training is not None and compiled.training.layers and compiled.plan.backward is not None
    planned = [n.name for part in (compiled.plan.forward, compiled.plan.backward) for n in part.graph]
    assert sorted(map(str, planned)) == sorted(str(n.name) for n in compiled.whole_training.model.graph)
    assert len(compiled.training.model.graph) < len(planned)
    assert "layers.9.up.weight" in wrapped.graph("training")


def test_dropout_draws_what_it_would() -> None:
    class Drops(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.3, self.training)

    module, made = Stack(blocks(Drops)), []
    for least in (like_layers.LEAST, 10**9):
        wrapped = ORTModule(module)
        with mock.patch.object(like_layers, "LEAST", least):
            torch.manual_seed(7)
            made.append(wrapped(torch.ones(5, 4)))
        assert rows(wrapped) == (least == like_layers.LEAST)
    assert torch.equal(*made)


def test_a_second_start_knows_which_layers_stand_for_all(tmp_path: Any) -> None:
    x = torch.randn(5, 4)
    for count in (8, 9, 8):
        torch.manual_seed(count)
        module = Stack(blocks(count=count))
        wrapped, eager = pair(module, cache_dir=tmp_path)
        same_step(wrapped, eager, x)
        assert rows(wrapped) == 1


def test_a_start_of_all_layers_recalls_no_short_graph(tmp_path: Any) -> None:
    def capture(**options: Any) -> tuple[int, bool]:
        report, module = Report(), Stack(blocks())
        made = Options(cache_dir=tmp_path, **options)
        captured = capture_module(module, (torch.ones(5, 4),), {}, made, report, None, Answers())
        assert len([p for p in captured.graph.signature.parameters if p.endswith("up.weight")]) == COUNT
        return len(report.layers), "export" in report.seconds

    with mock.patch("onnxtrain.capture.starts._CHECKED", 0.0):
        assert [capture(), capture()] == [(1, True), (1, False)]
        assert capture(save_onnx=tmp_path) == (0, True)  # a file is of all layers
        assert capture(save_onnx=tmp_path) == (0, False)
        assert capture() == (0, False)


def test_a_short_graph_that_cannot_be_made_whole_is_recalled_no_more(tmp_path: Any) -> None:
    x = torch.ones(5, 4)
    torch.manual_seed(0)
    module = Stack(blocks())
    ORTModule(module, Options(cache_dir=tmp_path))(x)
    with mock.patch.object(compiler, "whole", side_effect=NotRepeatedError("they are not alike")):
        wrapped, eager = pair(module, cache_dir=tmp_path)
        same_step(wrapped, eager, x)
    assert rows(wrapped) == 0


def test_explain_names_the_layers() -> None:
    wrapped = check(Stack(blocks()), 1)
    assert "layers.3 to layers.6 were not traced: they are as layers.2" in wrapped.explain()


def _bert() -> tuple[nn.Module, dict[str, Tensor], int]:
    ids = torch.randint(3, 90, (3, 12))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 7}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=99))
    return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}, 1


def _t5() -> tuple[nn.Module, dict[str, Tensor], int]:
    ids = torch.randint(3, 90, (3, 12))
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 8, "num_decoder_layers": 8}
    config = transformers.T5Config(**sizes, vocab_size=99, use_cache=False, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [_bert, _t5])
def test_programs_of_transformers_are_those_of_all_layers(make: Callable[[], Any]) -> None:
    """Rows of padding that are dropped, a position bias that all layers share, two rows: to the letter the same."""
    module, batch, expected = make()
    programs = []
    for least in (like_layers.LEAST, 10**9):
        wrapped = ORTModule(module)
        with mock.patch.object(like_layers, "LEAST", least):
            wrapped(**batch).loss.backward()
        assert rows(wrapped) == (expected if least == like_layers.LEAST else 0)
        programs.append([_numbered(wrapped.source(which)) for which in ("forward", "backward")])
    assert programs[0] == programs[1]


class GivesView(Block):
    """A layer whose result is a view of its own tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(1, -1, WIDTH)[0]


class GivesInput(Block):
    """A layer that has a weight, and gives a view of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x) if self.training else super().forward(x)


class GivesBoth(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = super().forward(x)
        return made, made[:, :1]


class ReadsBoth(Stack):
    """A part of what a layer gives is written before the next one has the whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            x, part = layer(x)
            if place == 5:
                part.mul_(3.0)
        return self.last(x)


class WritesEarlier(Stack):
    """What a layer was given is written after it has given a view of that."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            before, x = x, layer(x)
            if place == 5:
                before.mul_(3.0)
        return self.last(x)


def test_layers_that_give_views() -> None:
    check(Stack(blocks(GivesView)), 1)


def test_layers_that_give_views_of_what_else_there_is_are_all_traced() -> None:
    check(ReadsBoth(blocks(GivesBoth)), 0)
    check(WritesEarlier(blocks(GivesInput)), 0)


class Twofold(nn.Module):
    """What a layer gives does not depend on its weight, which another result does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + torch.zeros_like(x * self.weight)


class Shifted(Twofold):
    """The gradient that goes through a layer is not computed with what is the layer's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.weight


class Unweighted(Twofold):
    def forward(self, x: Tensor) -> Tensor:
        return x.type_as(x * self.weight) * 1.5


@pytest.mark.parametrize("kind", [Twofold, Unweighted])
def test_layers_whose_own_does_not_tell_how_many_there_are_are_all_traced(kind: type[nn.Module]) -> None:
    check(Stack(blocks(kind)), 0)


def test_gradients_that_pass_through_layers_are_those_of_all() -> None:
    """The forward pass is of stand-ins; the backward pass is built of all layers."""
    check(Stack(blocks(Shifted)), 1)
