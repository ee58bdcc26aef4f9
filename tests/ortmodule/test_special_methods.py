"""Special methods of the wrapped class: items, lengths, operators; and no others."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import captures, pair, same_step

from onnxtrain import ORTModule
from onnxtrain.ortmodule.special_methods import SPECIAL


def stack() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))


def x() -> torch.Tensor:
    return torch.randn(5, 4)


def test_a_sequential_is_read_like_one() -> None:
    inner = stack()
    wrapped = ORTModule(inner)
    assert len(wrapped) == 3 and wrapped[0] is inner[0] and wrapped[-1] is inner[-1]
    assert list(wrapped) == list(inner) and inner[1] in wrapped
    assert type(wrapped[:2]) is torch.nn.Sequential and len(wrapped[:2]) == 2
    assert [*wrapped + torch.nn.Sequential(inner[0])] == [*inner, inner[0]]
    assert [*torch.nn.Sequential(inner[0]) + wrapped] == [inner[0], *inner]
    assert bool(wrapped) and not ORTModule(torch.nn.Sequential()) and repr(wrapped).startswith("Sequential(")
    layers = ORTModule(torch.nn.ModuleDict({"a": inner[0]}))
    assert "a" in layers and list(layers) == ["a"] and layers["a"] is inner[0]
    assert list(reversed(ORTModule(Ordered(inner)))) == [inner[2], inner[1], inner[0]]


class Ordered(torch.nn.ModuleList):
    """A list that can be walked backwards, as another class of its own."""

    def __reversed__(self) -> Any:
        return iter([*self][::-1])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda layers: layers.__setitem__(1, torch.nn.ReLU()),
    "delete": lambda layers: layers.__delitem__(1),
    "pop": lambda layers: layers.pop(1),
    "append": lambda layers: layers.append(torch.nn.Sigmoid()),
    "add in place": lambda layers: layers.__iadd__(torch.nn.Sequential(torch.nn.Sigmoid())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_items_changes_the_wrapped_module(change: Callable[[Any], Any]) -> None:
    wrapped, eager = pair(stack())
    same_step(wrapped, eager, x())
    change(wrapped)
    change(eager)
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 2
    assert list(wrapped.children()) == list(wrapped.module.children()) and len(wrapped) == len(eager)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in eager.named_parameters()]


def test_operators_in_place_keep_the_wrapper() -> None:
    wrapped = ORTModule(stack())
    before = wrapped
    wrapped += torch.nn.Sequential(torch.nn.ReLU())
    assert wrapped is before and len(wrapped.module) == 4


def test_a_plain_module_has_none() -> None:
    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    wrapped = ORTModule(Plain())
    assert bool(wrapped) and not any(name in vars(type(wrapped)) for name in SPECIAL)
    for use in (len, iter, lambda m: m[0], lambda m: 1 in m, lambda m: m + m, reversed):
        with pytest.raises(TypeError):
            use(wrapped)


def test_what_a_class_turns_off_is_off() -> None:
    class Listed(torch.nn.ModuleList):
        __contains__ = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    wrapped = ORTModule(Listed())
    with pytest.raises(TypeError, match="not a container"):
        assert 1 in wrapped


def test_a_context_is_the_wrapper() -> None:
    class Context(torch.nn.Linear):
        entered = 0

        def __enter__(self) -> Any:
            self.entered += 1
            return self

        def __exit__(self, *_: Any) -> None:
            self.entered -= 1

    wrapped = ORTModule(Context(4, 4))
    with wrapped as inside:
        assert inside is wrapped and wrapped.entered == 1
    assert wrapped.entered == 0


def test_the_class_is_one_for_all_of_a_class_and_still_an_ortmodule() -> None:
    wrapped = ORTModule(stack())
    assert type(wrapped) is type(ORTModule(torch.nn.Sequential()))
    assert isinstance(wrapped, ORTModule) and type(wrapped).__name__ == "ORTModule"
    assert isinstance(wrapped, torch.nn.Sequential) and wrapped.__class__ is torch.nn.Sequential


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy", "torch.save"])
def test_copies_have_them(how: str) -> None:
    wrapped, eager = pair(torch.nn.Sequential(OrderedDict(first=torch.nn.Linear(4, 4), last=torch.nn.Tanh())))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        ways = {"pickle": lambda m: pickle.loads(pickle.dumps(m)), "deepcopy": copy.deepcopy, "copy": copy.copy}
        again = ways[how](wrapped)
    assert type(again) is type(wrapped) and len(again) == 2 and again[0] is again.first
    same_step(again, eager, x())
