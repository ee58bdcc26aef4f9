"""Parameters, buffers and identity with the wrapped module: behaviour.md §3.5 and §3.10, sentence by sentence."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures, pair, same_step

from onnxtrain import ModuleWithLoss, ORTModule
from onnxtrain.errors import CaptureError, ModuleError


class Net(torch.nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.used.weight
        self.only_in_training = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("idle", torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.used(x)))
        return self.norm(x + self.only_in_training(x) if self.training else x)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().sum()

    def named(self) -> str:
        return type(self).__name__


def x() -> torch.Tensor:
    return torch.randn(5, 4)


def test_shared_unused_and_frozen_parameters() -> None:
    wrapped, eager = pair(Net())
    for module in (wrapped, eager):
        module.only_in_training.bias.requires_grad_(False)
    for _ in range(2):
        same_step(wrapped, eager, x())
    assert len(list(wrapped.parameters())) == len(list(eager.parameters()))
    assert wrapped.unused.weight.grad is None and wrapped.only_in_training.bias.grad is None
    assert wrapped.used.weight is wrapped.tied.weight


class Counter(torch.nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.weight


def test_a_buffer_with_two_names_is_one() -> None:
    wrapped, eager = pair(torch.nn.Sequential(*[Counter()] * 2))
    for _ in range(2):
        same_step(wrapped, eager, x())
    assert wrapped[1].calls.item() == eager[1].calls.item() == 4


class Shared(torch.nn.Module):
    """Two buffers in one memory, of which one is written."""

    def __init__(self, part: slice, is_read: bool = True) -> None:
        super().__init__()
        memory = torch.zeros(3, 4)
        self.weight, self.is_read = torch.nn.Parameter(torch.ones(4)), is_read
        self.register_buffer("table", memory[:2])
        self.register_buffer("part", memory[part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.table[1].add_(1)
        return (x * self.weight + (self.part if self.is_read else self.table).sum()).sum()


def test_a_buffer_in_the_memory_of_one_that_is_written_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes to table, which shares memory with part") as caught:
        ORTModule(Shared(slice(1, 3)))(torch.randn(2, 4))
    assert __file__ in caught.value.source and "part.clone()" in caught.value.cure


@pytest.mark.parametrize("module", [Shared(slice(2, 3)), Shared(slice(1, 3), is_read=False)], ids=["apart", "unread"])
def test_buffers_that_do_not_meet_in_memory_are_their_own(module: Shared) -> None:
    wrapped, eager = ORTModule(module), Shared(slice(2, 3), module.is_read)
    for _ in range(2):
        torch.testing.assert_close(wrapped(torch.ones(2, 4)), eager(torch.ones(2, 4)))


def test_parameters_used_in_one_mode_only() -> None:
    wrapped, eager = pair(Net())
    for training in (True, False, True):
        wrapped.train(training)
        eager.train(training)
        same_step(wrapped, eager, x())


def test_buffers_are_updated_in_the_graph_and_idle_ones_left_out() -> None:
    wrapped, eager = pair(Net())
    for _ in range(3):
        same_step(wrapped, eager, x())
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(wrapped.get_buffer(name), buffer)
    assert "idle" not in wrapped.graph("captured") and "norm.running_mean" in wrapped.graph("captured")


def test_a_module_without_state() -> None:
    class Stateless(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x)

    wrapped, eager = pair(Stateless())
    same_step(wrapped, eager, x().requires_grad_())
    same_step(wrapped, eager, x())


def test_parameters_of_a_dtype_without_gradient() -> None:
    class Indexed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, self.order] * self.weight

    wrapped, eager = pair(Indexed())
    same_step(wrapped, eager, x())


def test_state_dict_loads_both_ways() -> None:
    wrapped, plain = ORTModule(Net()), Net()
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert not any(wrapped.load_state_dict(plain.state_dict()))
    assert not any(Net().load_state_dict(wrapped.state_dict()))
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({})
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(x()).square().sum().backward()
    optimizer.step()
    torch.optim.AdamW(plain.parameters()).load_state_dict(optimizer.state_dict())


def test_names_and_lookups_are_the_modules_own() -> None:
    inner = Net()
    wrapped = ORTModule(inner)
    for method in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = list(getattr(wrapped, method)()), list(getattr(inner, method)())
        assert [n for n, _ in ours] == [n for n, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in inner.named_modules()]
    assert wrapped.get_parameter("used.weight") is inner.used.weight
    assert wrapped.get_submodule("norm") is inner.norm
    found: list[torch.nn.Module] = []
    wrapped.apply(found.append)
    assert inner.used in found
    assert inspect.signature(wrapped.forward) == inspect.signature(inner.forward)


def test_methods_of_the_user_run_the_graph() -> None:
    wrapped, eager = pair(Net())
    given = x()
    torch.testing.assert_close(wrapped.loss_of(given), eager.loss_of(given))
    assert captures(wrapped) == 1


def test_methods_that_say_super_and_those_of_libraries_mean_the_module(tmp_path: Path) -> None:
    class Child(Net):
        def named(self) -> str:
            return "child of " + super().named()

    assert ORTModule(Child()).named() == "child of Child"
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    wrapped = ORTModule(BertModel(config))
    wrapped.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["BertModel"]
    torch.testing.assert_close(loaded.state_dict(), wrapped.state_dict())


def test_a_collision_of_names_is_announced() -> None:
    class Explaining(Net):
        def explain(self) -> str:
            return "mine"

    with pytest.warns(UserWarning, match="attribute explain collides with ORTModule's attribute name"):
        wrapped = ORTModule(Explaining())
    assert wrapped.module.explain() == "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(Net())
        ORTModule(ModuleWithLoss(Net()))
    with pytest.warns(UserWarning, match="attribute explain collides"):
        ORTModule(ModuleWithLoss(Explaining()))


def test_attributes_go_to_the_module_and_come_from_it() -> None:
    wrapped = ORTModule(Net())
    wrapped.note = 1
    wrapped.module.other = 2
    assert wrapped.module.note == 1 and wrapped.other == 2
    del wrapped.note
    assert not hasattr(wrapped.module, "note") and "used" in dir(wrapped)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = wrapped.nowhere


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_copies_work_and_are_of_their_own(how: str) -> None:
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    if how == "deepcopy":
        again = copy.deepcopy(wrapped)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(wrapped))
    else:
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert captures(again) == 0
    same_step(again, copy.deepcopy(eager), x())
    assert again.used.weight is not wrapped.used.weight


def test_moving_and_converting_keeps_the_parameters() -> None:
    wrapped = ORTModule(Net())
    weight = wrapped.used.weight
    assert wrapped.double() is wrapped and wrapped.used.weight is weight and weight.dtype == torch.float64
    assert wrapped.to("cpu", torch.float32) is wrapped and wrapped.module.used.weight.dtype == torch.float32


def test_attributes_set_by_a_custom_setattr() -> None:
    """As LightningModule has it."""

    class Noting(Net):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)

    wrapped, eager = pair(Noting())
    for step in range(3):
        wrapped.batch_size = 4
        same_step(wrapped, eager, x())
        assert captures(wrapped) == (1 if step == 0 else captures(wrapped))
    assert captures(wrapped) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2)),
        lambda: torch.jit.script(torch.nn.Linear(2, 2)),
        lambda: ORTModule(torch.nn.Linear(2, 2)),
        lambda: len,
    ],
)
def test_what_cannot_be_wrapped(make: Any) -> None:
    with pytest.raises(ModuleError) as caught:
        ORTModule(make())
    assert caught.value.cure
