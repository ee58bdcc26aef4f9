"""What needs a new graph and what does not: behaviour.md §3.2 row by row, and what its users complained of."""

from __future__ import annotations

import dataclasses
import enum
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import captures, pair, same_step
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertModel

from onnxtrain import ORTModule


class Net(torch.nn.Module):
    """Takes structures, numbers and flags."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        self.dropout = torch.nn.Dropout(0.0)
        self.twice = False

    def forward(
        self, x: Any, mask: torch.Tensor | None = None, flag: bool = False, scale: float = 1.0, count: int = 2
    ) -> torch.Tensor:
        x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, list) else x
        y = self.second(self.dropout(torch.tanh(self.first(x))))
        y = y * scale + count
        if mask is not None:
            y = y * mask
        if flag:
            y = torch.relu(y)
        return y * 2 if self.twice else y


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 4)))


def test_first_call_in_each_mode_captures_and_modes_keep_their_graphs() -> None:
    wrapped, eager = pair(Net())
    for expected in (1, 2, 2, 2):
        same_step(wrapped, eager, x())
        assert captures(wrapped) == expected
        for module in (wrapped, eager):
            module.train(not module.training)


@pytest.mark.parametrize(
    "second",
    [
        {"x": {"x": x()}},  # structure
        {"x": [x()]},
        {"x": x(), "mask": torch.ones(5, 1)},  # count, None-ness
        {"x": x(2, 5, 4)},  # rank
        {"x": x(), "flag": True},  # value of a bool
    ],
)
def test_structure_count_rank_none_and_bool_capture_again(second: dict[str, Any]) -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    same_step(wrapped, eager, **second)
    assert captures(wrapped) == 2
    same_step(wrapped, eager, x())
    same_step(wrapped, eager, **second)
    assert captures(wrapped) == 2


def test_input_dtype_captures_again() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    wrapped, eager = pair(Sum())
    for given in (x(), x().double(), torch.ones(5, 4, dtype=torch.int64)):
        same_step(wrapped, eager, given)
    assert captures(wrapped) == 3


def test_value_of_a_number_does_not() -> None:
    """The first value is a constant; from the second on it is a tensor."""
    wrapped, eager = pair(Net())
    for scale, count in ((1.0, 2), (0.5, 2), (0.25, 3), (-3.0, 7), (1.0, 2), (0.125, 9)):
        same_step(wrapped, eager, x(), scale=scale, count=count)
    assert captures(wrapped) <= 3


def test_a_number_that_steers_the_forward_pass_stays_a_constant() -> None:
    class Repeat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            for _ in range(times):
                x = torch.tanh(self.linear(x))
            return x

    wrapped, eager = pair(Repeat())
    for times in (1, 3, 2, 3, 1):
        same_step(wrapped, eager, x(), times=times)
    assert captures(wrapped) == 4  # that for 1, its first value, and one for each


def test_batch_and_length_do_not() -> None:
    wrapped, eager = pair(Net())
    for size in (5, 1, 2, 17, 64):
        same_step(wrapped, eager, x(size, 4))
    assert captures(wrapped) == 1


@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_attributes_set_on_either_side(through: str) -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    for value in (True, False, True):
        (wrapped if through == "wrapper" else wrapped.module).twice = value
        eager.twice = value
        same_step(wrapped, eager, x())
    assert captures(wrapped) == 2


def test_attributes_of_submodules_and_configurations() -> None:
    class Config:
        def __init__(self) -> None:
            self.gain = 1.0

    class Configured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.config.gain

    wrapped, eager = pair(Configured())
    same_step(wrapped, eager, x())
    wrapped.config.gain = eager.config.gain = 3.0
    same_step(wrapped, eager, x())
    wrapped.module.dropout.p = eager.dropout.p = 1.0
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 3


def test_an_attribute_that_cannot_be_compared_set_through_the_wrapper_captures_again() -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gains = [1.0, 2.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * sum(self.gains)

    wrapped, eager = pair(Listed())
    same_step(wrapped, eager, x())
    wrapped.gains = eager.gains = [5.0]
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 2


class Table(Net):
    """Holds a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table


def test_another_tensor_in_an_attribute_needs_a_graph() -> None:
    wrapped, eager = pair(Table())
    same_step(wrapped, eager, x())
    for module in (wrapped.module, eager):
        module.table.mul_(3)
    same_step(wrapped, eager, x())
    for module in (wrapped.module, eager):
        module.table = torch.arange(3.0)
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 2


def test_parameters_and_buffers_registered_through_the_wrapper() -> None:
    class Growing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + getattr(self, "shift", 0.0) * getattr(self, "scale", 1.0)

    wrapped, eager = pair(Growing())
    same_step(wrapped, eager, x())
    for module in (wrapped, eager):
        module.register_parameter("shift", torch.nn.Parameter(torch.ones(3)))
    same_step(wrapped, eager, x())
    assert wrapped.shift.grad is not None
    for module in (wrapped, eager):
        module.register_buffer("scale", torch.full((3,), 2.0))
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 3


@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_submodules_replaced_and_added(through: str) -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    replacement = torch.nn.Linear(6, 3)
    (wrapped if through == "wrapper" else wrapped.module).second = replacement
    eager.second = torch.nn.Linear(6, 3)
    eager.second.load_state_dict(replacement.state_dict())
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 2
    assert wrapped.second is replacement and replacement.weight.grad is not None
    wrapped.add_module("extra", torch.nn.Linear(1, 1))
    assert "extra.weight" in wrapped.state_dict() and wrapped.module.extra is wrapped.extra


def test_resized_embeddings() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(7, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids) @ self.words.weight.T

    wrapped, eager = pair(Words())
    ids = torch.tensor([[1, 2, 6]])
    same_step(wrapped, eager, ids)
    larger = torch.nn.Parameter(torch.randn(9, 4))
    wrapped.module.words.weight, eager.words.weight = larger, torch.nn.Parameter(larger.detach().clone())
    same_step(wrapped, eager, torch.tensor([[1, 8, 6]]))


def test_requires_grad_rebuilds_the_gradient_without_a_capture() -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    for step in range(3):
        for module in (wrapped, eager):
            module.first.requires_grad_(step != 0)
        same_step(wrapped, eager, x())
        assert (wrapped.first.weight.grad is None) == (step == 0)
    given = x().requires_grad_()
    same_step(wrapped, eager, given)
    assert captures(wrapped) == 1


@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_dtype_of_the_module(through: str) -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    (wrapped if through == "wrapper" else wrapped.module).double()
    eager.double()
    same_step(wrapped, eager, x().double())
    assert wrapped.first.weight.dtype == torch.float64 and captures(wrapped) == 2


def test_autocast_and_default_dtype_are_looked_at_in_every_call() -> None:
    wrapped = ORTModule(Net())
    assert wrapped(x()).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert wrapped(x()).dtype == Net()(x()).dtype
    assert wrapped(x()).dtype == torch.float32 and captures(wrapped) == 2


def test_nothing_is_skipped_after_many_steps() -> None:
    wrapped, eager = pair(Net())
    for _ in range(20):
        same_step(wrapped, eager, x())
    same_step(wrapped, eager, x(), flag=True)
    same_step(wrapped, eager, x(3, 2, 4))
    assert captures(wrapped) == 3


def test_what_the_forward_pass_sets_once_is_a_reason_once() -> None:
    class Config:
        problem: str | None = None

    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.config.problem = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.config.problem is None:
                self.config.problem = "regression"
            return super().forward(x)

    wrapped, eager = pair(Lazy())
    for _ in range(3):
        same_step(wrapped, eager, x())
    assert captures(wrapped) == 2, "the second call might go another way, and no more is set then"


class Scaled(Net):
    """Reads what its configuration says by how much to scale: a number, a list, a tensor or an array."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=2.0, dtype=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.config.scale
        scale = sum(scale) if isinstance(scale, list) else torch.as_tensor(scale).sum()
        y = super().forward(x) * scale
        return y if self.config.dtype is None else y.to(self.config.dtype)


@pytest.mark.parametrize("value", [[1.0, 4.0], torch.tensor([1.0, 4.0]), np.array([1.0, 4.0])], ids=type)
def test_an_attribute_becomes_what_cannot_be_compared(value: Any) -> None:
    wrapped, eager = pair(Scaled())
    same_step(wrapped, eager, x())
    eager.config.scale = wrapped.config.scale = value
    for _ in range(2):
        same_step(wrapped, eager, x())
    assert captures(wrapped) == 2


def test_saving_is_no_reason_though_it_writes_into_the_configuration(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    wrapped = ORTModule(BertModel(config).eval())
    before = wrapped(torch.tensor([[1, 2, 3]])).last_hidden_state
    wrapped.save_pretrained(tmp_path)
    assert config.architectures == ["BertModel"] and config.dtype == "float32"
    torch.testing.assert_close(wrapped(torch.tensor([[1, 2, 3]])).last_hidden_state, before)
    assert captures(wrapped) == 1


def test_a_dtype_in_a_configuration_of_ones_own_is_looked_at() -> None:
    wrapped, eager = pair(Scaled())
    same_step(wrapped, eager, x())
    eager.config.dtype = wrapped.config.dtype = torch.float64
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 2


def test_ignored_attributes() -> None:
    wrapped, eager = pair(Net(), ignored_attributes=("step",))
    wrapped.step = 0
    for step in range(3):
        wrapped.step = step
        same_step(wrapped, eager, x())
    assert captures(wrapped) == 1


def test_explain_says_why_there_is_each_graph() -> None:
    wrapped = ORTModule(Net())
    assert "not called" in wrapped.explain()
    wrapped(x())
    wrapped(x(), flag=True)
    wrapped(x(1, 2, 4))
    wrapped.module.dropout.p = 0.5
    wrapped(x())
    wrapped.eval()
    wrapped(x())
    text = wrapped.explain()
    assert text.startswith("5 calls, 5 graphs")
    for reason in (
        "it is the first call",
        "input flag is new",
        "rank of input tensor 0 is 3 and was 2",
        "attribute p was 0.0 and is 0.5",
        "attribute training was True and is False",
    ):
        assert reason in text, text
    assert "x: (x_dim0, 4)" in text and "dimension 1 is always 4" in text


def test_many_graphs_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = ORTModule(Net())
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for step in range(8):
            wrapped.module.dropout.p = step / 16
            wrapped(x())
    assert "8 graphs" in caplog.text and "attribute p was 0.375 and is 0.4375" in caplog.text


class AsksForGradients(torch.nn.Module):
    """Computes what torch says of gradients."""

    def __init__(self, asked: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.weight, self.asked = torch.nn.Parameter(torch.ones(3)), asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + float(self.asked(x * 1))


@pytest.mark.parametrize(
    "asked",
    [
        *(lambda y: y.requires_grad, lambda y: y.grad_fn is None, lambda y: y.is_leaf),
        lambda y: torch.is_grad_enabled(),
    ],
)
@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)])
def test_what_is_asked_of_gradients(asked: Callable[[torch.Tensor], bool], modes: tuple[bool, ...]) -> None:
    wrapped, eager = pair(AsksForGradients(asked))
    x = torch.randn(2, 3, requires_grad=True)
    for mode in modes:
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(wrapped(x), eager(x))
    assert captures(wrapped) == 2


def test_what_is_asked_of_gradients_where_parameters_are_frozen_in_turn() -> None:
    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second(y * (2 if y.requires_grad else 3))

    wrapped, eager = pair(Asks())
    for frozen in (False, True, False):
        for model in (wrapped, eager):
            model.first.requires_grad_(not frozen)
        x = torch.randn(2, 3)
        torch.testing.assert_close(wrapped(x), eager(x))
    assert captures(wrapped) == 2


def test_the_order_of_keyword_arguments_that_the_module_sees() -> None:
    class Joined(torch.nn.Module):
        def forward(self, first: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
            return torch.cat([first, *others.values()], -1)

    wrapped, eager = pair(Joined())
    for given in ({"b": x(), "a": x()}, {"a": x(), "b": x()}, {"b": x(), "a": x()}):
        assert wrapped(**given, first=given["a"] * 2).equal(eager(**given, first=given["a"] * 2))
    assert captures(wrapped) == 2


def test_arguments_that_are_equal_and_of_another_type() -> None:
    class Told(torch.nn.Module):
        def forward(self, x: torch.Tensor, flag: Any) -> torch.Tensor:
            return x * (2 if flag is True else 3 if isinstance(flag, int) else 4) * flag

    wrapped, eager = pair(Told())
    for flag in (True, 1, 1.0, 2, 2.0, 3.5, False, Level.HIGH, 2, True):
        given = torch.arange(4)
        assert wrapped(given, flag).dtype == eager(given, flag).dtype
        assert wrapped(given, flag).equal(eager(given, flag))


class Level(enum.IntEnum):
    HIGH = 2


GAINS = {1: 2.0, 2: 3.0}
NUMBERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {  # a number is Python's at each value
    "its type": lambda y, n: y * (n if isinstance(n, int | float) else n.view(-1, 1) * 2),
    "a power": lambda y, n: y * 10 ** (-n) + y * 2**-n,
    "a key": lambda y, n: y * GAINS.get(n, 1.0) * (2 if n in {1, 3} else 1),
    "returned": lambda y, n: (y, n, n * 2, [n + 0.5]),
    "a size": lambda y, n: (y[:, :n], y.new_zeros(n), str(n), f"{n:03d}"),
    "a quotient": lambda y, n: y * (n / 10) + y * (1.0 / (n + 1)) + y * n**0.5 + y * 0.9**n,
    "a branch": lambda y, n: y * 2 if n > 2 else y * 3,
    "how often": lambda y, n: sum([y * i for i in range(n)], y),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_varies_is_one_of_pythons(name: str) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, options: dict[str, int]) -> Any:
            return NUMBERS[name](self.linear(x), options["n"])

    wrapped, eager = pair(Scaled().double())
    for number in (1, 2, 3, 2, 4):
        given = x().double()
        made, expected = wrapped(given, {"n": number}), eager(given, {"n": number})
        for one, other in zip(pytree.tree_leaves(made), pytree.tree_leaves(expected), strict=True):
            assert one == other if isinstance(other, str) else torch.allclose(*map(torch.as_tensor, (one, other)))
        assert [type(leaf) for leaf in pytree.tree_leaves(made)] == [
            type(leaf) for leaf in pytree.tree_leaves(expected)
        ]


class Schedule:
    rate = 2.0


class Cell:
    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2 if self.layer.training else 3)


class Holder(torch.nn.Module):
    """Holds what is no part of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        held: dict[str, Any] = {
            "a layer in a tuple": (layer,),
            "a layer of a helper": Cell(layer),
            "a class": Schedule,
            "a configuration in others": types.SimpleNamespace(
                a=types.SimpleNamespace(b=types.SimpleNamespace(c=types.SimpleNamespace(rate=2.0)))
            ),
            "an object in collections": [{"of": Cell(layer)}],
        }
        self.held = held.get(name, layer)
        if name == "a layer in the table":
            del self.held
            self.__dict__["held"] = layer


HELD: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[Any], Any]]] = {
    "a layer in a tuple": (lambda held, y: held[0](y) * (1 + held[0].training), lambda held: held[0].eval()),
    "a layer in the table": (lambda held, y: held(y) * (1 + held.training), lambda held: held.eval()),
    "a layer of a helper": (lambda held, y: held(y), lambda held: held.layer.eval()),
    "a class": (lambda held, y: y * held.rate, lambda held: setattr(held, "rate", held.rate + 1)),
    "a configuration in others": (lambda held, y: y * held.a.b.c.rate, lambda held: setattr(held.a.b.c, "rate", 5.0)),
    "an object in collections": (lambda held, y: held[0]["of"](y), lambda held: held[0]["of"].layer.eval()),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds_is_looked_at_however_deep(name: str) -> None:
    compute, change = HELD[name]

    class Holding(Holder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(self.held, self.linear(x))

    wrapped, eager = pair(Holding(name))
    same_step(wrapped, eager, x())
    for held in {id(m.held): m.held for m in (wrapped.module, eager)}.values():
        change(held)
    same_step(wrapped, eager, x())


def test_weights_that_are_tied_no_longer() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh())

    wrapped, eager = pair(Tied())
    same_step(wrapped, eager, x())
    for module in (wrapped.module, eager):
        module.second.weight = torch.nn.Parameter(module.first.weight.detach() * 3)
    same_step(wrapped, eager, x())


def test_state_that_is_reset_through_the_wrapper_needs_one_graph() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self._last = torch.nn.Linear(4, 4), torch.zeros(5, 4)

        def reset(self) -> None:
            self._last = torch.zeros(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (self.linear(x) + self._last).tanh()
            self._last = y.detach()
            return y

    wrapped, eager = pair(Recurrent())
    for step in range(6):
        if step % 2:
            wrapped.reset(), eager.reset()
        same_step(wrapped, eager, x())
    assert captures(wrapped) == 1


@pytest.mark.parametrize("change", ["data", "numpy", "another"])
def test_a_tensor_of_an_attribute_is_read_at_every_call(change: str) -> None:
    wrapped, eager = pair(Table())
    same_step(wrapped, eager, x())
    for module in (wrapped.module, eager):
        if change == "data":
            module.table.data.mul_(3)
        elif change == "numpy":
            module.table.numpy()[:] = 5
        else:
            module.table.data = torch.arange(6.0).view(2, 3)[1:]
    same_step(wrapped, eager, x())


def test_caches_that_are_filled_in_inference_mode() -> None:
    class Cached(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.ones(3) * 2
            return super().forward(x) * self.table

    wrapped, eager = pair(Cached().eval())
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad):
        given = x()
        with mode():
            torch.testing.assert_close(wrapped(given), eager(given))


def test_how_much_is_in_a_list_that_a_call_extends() -> None:
    class Bank(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bank: list[torch.Tensor] | None = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.bank is not None and len(self.bank) < 2:
                self.bank.append(y.detach().mean())
            return y

    wrapped, eager = pair(Bank())
    for _ in range(4):
        same_step(wrapped, eager, x())
    torch.testing.assert_close(wrapped.bank, eager.bank)
    wrapped.bank = eager.bank = None
    same_step(wrapped, eager, x())


def test_attributes_of_a_dataclass_that_are_no_fields() -> None:
    class Masked(torch.nn.Module):
        def forward(self, batch: Any) -> torch.Tensor:
            return batch.x * batch.mask

    wrapped, eager = pair(Masked())
    for _ in range(2):
        batch = WithMask(x())
        assert wrapped(batch).equal(eager(batch))


@dataclasses.dataclass
class WithMask:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.mask = self.x > 0


class _Keeper(torch.nn.Module):
    """A module that keeps its own optimizer, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.steps, self.last, self.phase = 0, None, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


class _Scheduled(_Keeper):
    """One that reads the schedule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.schedule.last_epoch)


class _Whole(_Keeper):
    """One that reads all that it has at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + vars(self)["steps"])


@pytest.mark.parametrize("kind", [_Keeper, _Scheduled, _Whole])
def test_what_training_changes_and_the_forward_pass_does_not_read(kind: type[_Keeper]) -> None:
    """Counters, losses, optimizers and schedules that a module keeps need no graph each, unless it reads them."""
    module, eager = kind(), kind()
    eager.layer.load_state_dict(module.layer.state_dict())
    wrapped = ORTModule(module)
    for _ in range(4):
        x = torch.randn(3, 4)
        loss, want = wrapped(x), eager(x)
        torch.testing.assert_close(loss, want)
        loss.backward()
        want.backward()
        for one in (module, eager):
            one.optimizer.step()
            one.schedule.step()
            one.steps, one.last, one.phase = one.steps + 1, float(want.detach()), want.detach()
    assert captures(wrapped) == 1 if kind is _Keeper else captures(wrapped) > 1


def test_an_attribute_that_another_mode_reads() -> None:
    """What evaluation alone reads is looked at from then on."""

    class Model(torch.nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.temperature = torch.nn.Linear(4, 4), "warm"
            self.factor = torch.ones(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y if self.training else y * self.factor

    wrapped, x = ORTModule(Model()), torch.randn(2, 4)
    for factor in (1.0, 2.0, 3.0):
        wrapped.train()
        wrapped(x)
        wrapped.factor = torch.tensor(factor)
        wrapped.eval()
        torch.testing.assert_close(wrapped(x), wrapped.module.layer(x) * factor)
