"""What a forward pass reads in collections, global names, closures and classes may change: then it is another call."""

from __future__ import annotations

import argparse
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from parity import captures

from onnxtrain import Options, ORTModule
from onnxtrain.capture.reached_code import Named, named_by
from onnxtrain.ortmodule.contents import Contents

Tensor = torch.Tensor
SCALE, LIST, TABLE = 2.0, [2.0], {"scale": 2.0}
TENSOR, TEACHER = torch.full((3,), 2.0), torch.nn.Dropout(0.9)
SETTINGS = argparse.Namespace(inner=types.SimpleNamespace(scale=2.0), step=0)
STEP, CACHED = 0, None
CACHES: dict[int, Tensor] = {}


class Scaled(torch.nn.Module):
    """Something of what it has scales its weight."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.weight, self.held, self.history = torch.nn.Parameter(torch.randn(3)), held, []

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale()

    def scale(self) -> Any:
        return self.held[0]


class OfDict(Scaled):
    def scale(self) -> Any:
        return self.held["inner"]["scale"]


class OfNamespace(Scaled):
    def scale(self) -> Any:
        return self.held.scales[0]


class OfSet(Scaled):
    def scale(self) -> Any:
        return 2.0 if 3 in self.held else 1.0


class OfLength(Scaled):
    def scale(self) -> Any:
        return len(self.held)


class OfLayer(Scaled):
    def scale(self) -> Any:
        return self.held[0](torch.full((3,), 2.0))


class OfFunction(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.held[0](x * self.weight)


class OfClass(Scaled):
    factor = 2.0

    def scale(self) -> Any:
        return self.factor


class Global(Scaled):
    def scale(self) -> Any:
        return math.sqrt(_scale())


def _scale() -> float:
    return SCALE


class GlobalList(Scaled):
    def scale(self) -> Any:
        return LIST[0] * TABLE["scale"]


class GlobalTensor(Scaled):
    def scale(self) -> Any:
        return TENSOR


class GlobalSettings(Scaled):
    def scale(self) -> Any:
        return SETTINGS.inner.scale


class GlobalObject(Scaled):
    """Has it as a whole."""

    def scale(self) -> Any:
        return _scale_of(SETTINGS.inner) * SCHEDULE.value()


def _scale_of(settings: Any) -> float:
    return settings.scale


class Schedule:
    def __init__(self) -> None:
        self.factor = 2.0

    def value(self) -> float:
        return self.factor


SCHEDULE = Schedule()


class OfObjects(Scaled):
    def scale(self) -> Any:
        return self.held[0].value()


class GlobalLayer(Scaled):
    def scale(self) -> Any:
        return TEACHER(torch.full((3,), 2.0))


class Closure(Scaled):
    """Has a function that sees a variable."""

    def __init__(self) -> None:
        super().__init__()
        factor = 2.0

        def change(value: float) -> None:
            nonlocal factor
            factor = value

        self.scale, self.change = lambda: factor, change  # type: ignore[method-assign]


def _set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: globals().__setitem__(name, value)


@pytest.fixture(autouse=True)
def _globals() -> Any:
    before = {n: globals()[n] for n in ("SCALE", "TENSOR", "TEACHER", "STEP", "CACHED")}
    yield
    globals().update(before)
    LIST[0], TABLE["scale"], SETTINGS.inner.scale, OfClass.factor = 2.0, 2.0, 2.0, 2.0
    SCHEDULE.factor = 2.0
    CACHES.clear()
    TEACHER.train()


CHANGES: dict[str, tuple[Callable[[], Scaled], Callable[[Any], Any]]] = {
    "a list": (lambda: Scaled([2.0]), lambda m: m.held.__setitem__(0, 3.0)),
    "a list in a tuple": (lambda: OfLength(([1],)), lambda m: setattr(m, "held", ([1], [2]))),
    "its length": (lambda: OfLength([1]), lambda m: m.held.append(2)),
    "an array": (lambda: Scaled(numpy.array([2.0])), lambda m: m.held.__setitem__(0, 3.0)),
    "a dict in a dict": (lambda: OfDict({"inner": {"scale": 2.0}}), lambda m: m.held["inner"].update(scale=3.0)),
    "a list of a namespace": (
        lambda: OfNamespace(types.SimpleNamespace(scales=[2.0])),
        lambda m: m.held.scales.__setitem__(0, 3.0),
    ),
    "a set": (lambda: OfSet({1}), lambda m: m.held.add(3)),
    "a tensor of a list": (lambda: Scaled([torch.ones(3)]), lambda m: m.held.__setitem__(0, torch.zeros(3))),
    "a function of a list": (lambda: OfFunction([F.relu]), lambda m: m.held.__setitem__(0, F.gelu)),
    "a layer of a list": (lambda: OfLayer([torch.nn.ReLU()]), lambda m: m.held.__setitem__(0, torch.nn.Sigmoid())),
    "the mode of a layer of a list": (lambda: OfLayer([torch.nn.Dropout(1.0)]), lambda m: m.held[0].eval()),
    "a class": (OfClass, lambda m: setattr(OfClass, "factor", 3.0)),
    "a global number": (Global, _set_global("SCALE", 3.0)),
    "a global function": (Global, lambda m: globals().__setitem__("SCALE", 9.0)),
    "a global list": (GlobalList, lambda m: LIST.__setitem__(0, 3.0)),
    "a global dict": (GlobalList, lambda m: TABLE.update(scale=3.0)),
    "a global tensor": (GlobalTensor, _set_global("TENSOR", torch.ones(3))),
    "global settings": (GlobalSettings, lambda m: setattr(SETTINGS.inner, "scale", 3.0)),
    "global settings as a whole": (GlobalObject, lambda m: setattr(SETTINGS.inner, "scale", 3.0)),
    "a global object": (GlobalObject, lambda m: setattr(SCHEDULE, "factor", 3.0)),
    "an object of a list": (lambda: OfObjects([Schedule()]), lambda m: setattr(m.held[0], "factor", 3.0)),
    "the mode of a global layer": (GlobalLayer, lambda m: TEACHER.eval()),
    "a closure": (Closure, lambda m: m.change(3.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_call_reads_may_change_between_calls(what: str) -> None:
    make, change = CHANGES[what]
    module = make()
    wrapped = ORTModule(module, options=Options(summary=False))
    x = torch.randn(4, 3)
    wrapped(x)
    before = captures(wrapped)
    change(module)
    for _ in range(2):
        torch.testing.assert_close(wrapped(x), module(x))
    assert captures(wrapped) == before + 1


def test_the_reason_names_what_changed() -> None:
    wrapped = ORTModule(Global(), options=Options(summary=False))
    wrapped(torch.randn(4, 3))
    globals()["SCALE"] = 3.0
    wrapped(torch.randn(4, 3))
    assert "SCALE was 2.0 and is 3.0" in wrapped.explain()


def test_what_is_read_is_known_without_a_trace(tmp_path: Path) -> None:
    x, options = torch.randn(4, 3), Options(summary=False, cache_dir=tmp_path)
    for _ in range(2):  # as in another process
        module = OfDict({"inner": {"scale": 2.0}})
        wrapped = ORTModule(module, options=options)
        wrapped(x)
        module.held["inner"]["scale"] = 3.0
        torch.testing.assert_close(wrapped(x), module(x))


def test_what_no_call_reads_is_not_compared() -> None:
    """Lists that a training loop fills, its own global names, and equal contents in other objects."""
    module = Scaled([2.0])
    wrapped = ORTModule(module, options=Options(summary=False))
    for step in range(4):
        wrapped(torch.randn(4, 3)).sum().backward()
        module.history.append(step)
        SETTINGS.step = globals()["STEP"] = step
        module.held = [2.0]
    assert captures(wrapped) == 1


class Caching(torch.nn.Module):
    """Keeps what it makes in a global name, and in a global table."""

    def forward(self, x: Tensor) -> Tensor:
        global CACHED
        size = x.shape[0]
        if CACHED is None or CACHED.shape[0] != size:
            CACHED = torch.arange(size).to(x.dtype)
        if size not in CACHES:
            CACHES[size] = torch.ones(size)
        return x * CACHED + CACHES[size]


def test_caches_that_calls_fill_are_no_reason_for_a_graph() -> None:
    module = Caching()
    wrapped = ORTModule(module, options=Options(summary=False))
    sizes = (2, 3, 4)
    for n in (*sizes, *sizes):
        torch.testing.assert_close(wrapped(x := torch.randn(n, requires_grad=True)), module(x))
    assert captures(wrapped) <= len(sizes) + 1


def test_ignored_names_are_not_compared() -> None:
    wrapped = ORTModule(Global(), options=Options(summary=False, ignored_attributes=("SCALE",)))
    for n in range(3):
        globals()["SCALE"] = float(n)
        wrapped(torch.randn(4, 3))
    assert captures(wrapped) == 1


def test_names_of_other_functions_are_not_found() -> None:
    labels = {named.label for named in named_by(GlobalSettings())}
    assert {"SETTINGS", "SETTINGS.inner", "SETTINGS.inner.scale"} <= labels
    assert not labels & {"STEP", "SCALE", "SETTINGS.step", "step"}


def test_large_collections_are_compared_by_their_length() -> None:
    held = [*range(2000)]
    contents = Contents([Named("held", lambda: held)], Global())
    held[0] = 1
    assert contents.are_the_same()
    held.append(1)
    assert not contents.are_the_same() and contents.changed() == {"held": "has another content"}


def test_what_is_another_at_every_call_runs_in_eager_until_it_settles(caplog: pytest.LogCaptureFixture) -> None:
    module = Global()
    wrapped = ORTModule(module, options=Options(summary=False))
    x = torch.randn(4, 3)
    for step in range(14):
        globals()["SCALE"] = float(step)
        torch.testing.assert_close(wrapped(x), module(x))
    assert captures(wrapped) == 8 and "6 calls in eager PyTorch" in wrapped.explain()
    assert "SCALE was 7.0 and is 8.0; such calls run in eager PyTorch" in caplog.text
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), module(x))
    assert captures(wrapped) == 9 and "6 calls in eager PyTorch" in wrapped.explain()


def test_attributes_that_are_others_at_every_call_run_in_eager_until_they_settle() -> None:
    module = Scaled([2.0])
    module.scale = lambda: float(module.held)  # type: ignore[method-assign]
    wrapped = ORTModule(module, options=Options(summary=False))
    x = torch.randn(4, 3)
    for step in (*range(12), 11, 11, 3):
        module.held = str(step)
        torch.testing.assert_close(wrapped(x), module(x))
    assert captures(wrapped) == 9
