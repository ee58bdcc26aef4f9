"""Training that goes past the graph is said once, and only where it does."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onnxtrain import ModuleWithLoss, Options, ORTModule

SAID = "is trained without its graph"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.linear = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.frozen(x).tanh())


def x() -> torch.Tensor:
    return torch.randn(5, 4)


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(SAID in record.message for record in caplog.records)


def hooks(module: torch.nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "onnxtrain")


def replaced(module: Any) -> Any:
    former = module.forward
    module.forward = lambda x: module.linear(x) if x.dim() else former(x)
    return module(x())


PAST: dict[str, Callable[[Any], Any]] = {
    "the wrapped module": lambda module: module.module(x()),
    "a submodule": lambda module: module.linear(x()),
    "a forward around it that does not call it": replaced,
    "a copy": lambda module: copies.append(copy.deepcopy(module)) or copies[-1].module(x()),
    "after pickling": lambda module: copies.append(pickle.loads(pickle.dumps(module))) or copies[-1].module(x()),
}
copies: list[Any] = []


@pytest.mark.parametrize("call", PAST.values(), ids=PAST)
def test_gradients_without_a_call_are_said_once(call: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    wrapped = ORTModule(Net())
    for _ in range(2):
        call(wrapped).sum().backward()
    copied = bool(copies)
    copies.clear()
    assert said(caplog) == (2 if copied else 1)
    assert "Net" in caplog.text and "model.module(...)" in caplog.text
    assert copied or hooks(wrapped) == 0


def exported(wrapped: Any) -> None:
    torch.export.export(wrapped, (x(),))
    wrapped.module(x()).sum().backward()


def stepped(module: torch.nn.Module) -> None:
    module(x()).sum().backward()


FINE: dict[str, Callable[[], Any]] = {
    "a graph": lambda: stepped(ORTModule(Net())),
    "a graph, then eager": lambda: [stepped(m := ORTModule(Net())), stepped(m.module)],
    "eager fallback": lambda: stepped(ORTModule(Data(), options=Options(fallback="eager"))),
    "export": lambda: exported(ORTModule(Net())),
    "no gradient": lambda: ORTModule(Net()).module(x()),
    "the wrapper is gone": lambda: gone(Net()),
    "inside of another": lambda: stepped(ORTModule(torch.nn.Sequential(ORTModule(Net())))),
    "another of the same": lambda: both(Net()),
    "with its loss": lambda: with_loss(Net()),
}


class Data(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y


def gone(module: torch.nn.Module) -> None:
    ORTModule(module)
    gc.collect()
    stepped(module)


def both(module: torch.nn.Module) -> None:
    first, second = ORTModule(module), ORTModule(module)
    stepped(first)
    del second


def with_loss(module: torch.nn.Module) -> None:
    plain, loss = ORTModule(module), ORTModule(ModuleWithLoss(module, lambda y, _: y.sum()))
    loss({"x": x()}).backward()
    del plain


@pytest.mark.parametrize("train", FINE.values(), ids=FINE)
def test_nothing_is_said_where_the_graph_is_called(train: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    train()
    assert said(caplog) == 0


def test_nothing_is_left_after_the_first_call() -> None:
    wrapped = ORTModule(Net())
    assert hooks(wrapped) == 2, "of what is trained"
    wrapped.eval()
    wrapped(x())
    assert hooks(wrapped) == 0
    wrapped.train()
    stepped(wrapped)
    assert hooks(wrapped) == 0 and hooks(copy.deepcopy(wrapped)) == 2


def test_hooks_of_the_watch_are_not_saved() -> None:
    wrapped, file = ORTModule(Net()), io.BytesIO()
    torch.save(wrapped.module, file)
    torch.save(wrapped.state_dict(), io.BytesIO())
    file.seek(0)
    assert hooks(torch.load(file, weights_only=False)) == 0 and hooks(copy.deepcopy(wrapped.module)) == 0


def test_a_lazy_module_is_wrapped() -> None:
    wrapped = ORTModule(torch.nn.LazyLinear(2))
    assert hooks(wrapped) == 0
