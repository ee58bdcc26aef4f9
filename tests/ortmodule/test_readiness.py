"""onnxtrain.check: everything that keeps a module from being trained, in one go and without a step."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch

import onnxtrain
from onnxtrain import Options, ORTModule, check
from onnxtrain.gradient import rules  # noqa: F401  (fills RULES)
from onnxtrain.gradient.registry import RULES

X = torch.randn(2, 4)


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.count += 1
        if y.sum() > 100:
            y = y + 1
        if bool((x > 1e6).all()):
            y = y - 1
        return torch.nn.functional.softsign(y).sum()


class Clean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.spare = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu().sum()


def test_a_module_that_trains_has_no_blockers() -> None:
    found = check(Clean(), X)
    assert found, str(found)
    assert "can be trained" in str(found) and "spare" in str(found), "a parameter that is not read is worth a note"


def test_lines_that_look_into_tensors_are_paths_and_in_nobodys_way() -> None:
    module = Branches()
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = check(module, (X,))
    assert found, str(found)
    for text in ("y.sum() > 100", "(x > 1e6).all()"):
        assert f"test_readiness.py:{line_of(Branches.forward, text)} saw False" in str(found), (text, str(found))
    torch.testing.assert_close(module.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_operators_are_looked_at_behind_the_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Softsign", "Abs"):  # softsign is one node, or decomposed
        monkeypatch.delitem(RULES, ("", name))
    found = check(Branches(), X, options=Options(backend="onnxruntime"))
    kinds = {b.kind for b in found.blockers}
    assert kinds == {"GradientError"}, str(found)
    line = line_of(Branches.forward, "softsign")
    assert any(b.source == f"test_readiness.py:{line}" for b in found.blockers), str(found)


def test_hooks_types_and_graph_are_listed_together() -> None:
    module = Branches()
    module.linear.register_forward_hook(lambda *_: print())
    module.linear.register_full_backward_hook(lambda *_: None)
    module.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    text = str(check(module, {"x": X}))
    for part in ("forward hook", "backward hook", "phase is complex64", "saw False"):
        assert part in text, (part, text)


def test_devices_are_listed_each() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta"))
    found = check(module, X)
    assert [b.kind for b in found.blockers] == ["DeviceError"] and "meta" in str(found)


@pytest.mark.parametrize("subject", ["not a module", torch.nn.DataParallel(torch.nn.Linear(4, 4))])
def test_what_is_no_module_of_its_own_is_a_blocker(subject) -> None:
    assert [b.kind for b in check(subject, X).blockers] == ["ModuleError"]


def test_inputs_that_no_graph_takes_are_a_blocker() -> None:
    assert [b.kind for b in check(Clean(), {"x": object()}).blockers] == ["UnsupportedDataError"]


def test_a_wrapped_module_keeps_its_options() -> None:
    wrapped = ORTModule(Clean(), options=Options(backend="onnxruntime"))
    assert onnxtrain.check(wrapped, X).backend == "onnxruntime"


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.lock = threading.Lock()  # which cannot be copied

    def forward(self, *args: torch.Tensor) -> Any:
        return self.linear(args[0])


class Raises(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of my own")


class Generates(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        yield self.linear(x)


class Hooked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(lambda *_: None)


class Unnamed(Layer):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no names")


class NoForward(Layer):
    @property
    def forward(self) -> Any:
        raise RuntimeError("no forward")


class NoInit(torch.nn.Module):
    def __init__(self) -> None:
        pass


def inside_itself() -> dict[str, Any]:
    batch: dict[str, Any] = {}
    batch["x"] = batch
    return batch


ODD: dict[str, tuple[Any, Any, str]] = {
    "any arguments": (Layer(), X, ""),
    "raises": (Raises(), X, "of my own"),
    "generates": (Generates(), X, "generator"),
    "backward hook, no copy": (Hooked(), X, "backward hook"),
    "raises when looked at": (Unnamed(), X, "cannot be looked at: RuntimeError: no names"),
    "no forward": (NoForward(), X, "no forward"),
    "not initialized": (NoInit(), X, "cannot be looked at"),
    "lazy": (torch.nn.LazyLinear(3), X, "parameter weight has no size yet"),
    "a list of modules": (torch.nn.ModuleList(), X, "forward"),
    "no parameters": (torch.nn.Tanh(), X, "no output depends on what is trained"),
    "a function": (lambda x: x, X, "not a function"),
    "a class": (torch.nn.Linear, X, "not a type"),
    "nothing": (None, X, "not a NoneType"),
    "nested": (torch.nn.Linear(4, 4), torch.nested.nested_tensor([X, X]), "cannot be looked at"),
    "no batch": (torch.nn.Linear(4, 4), None, "cannot be captured"),
    "other names": (torch.nn.Linear(4, 4), {"y": X}, "cannot be captured"),
    "a batch inside itself": (torch.nn.Linear(4, 4), inside_itself(), "recursion"),
}


@pytest.mark.parametrize(("module", "batch", "said"), ODD.values(), ids=ODD)
def test_what_cannot_be_looked_at_is_reported(module: Any, batch: Any, said: str) -> None:
    found = check(module, batch)
    assert said in str(found) and bool(found) is (said == ""), str(found)
    assert all(b.cure for b in found.blockers)


def test_what_stops_it_is_named_by_the_users_line() -> None:
    (found,) = check(Unnamed(), X).blockers
    assert found.source == f"{__file__}:{line_of(Unnamed.named_parameters, 'raise')}"
