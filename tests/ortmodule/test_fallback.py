"""Failures and what may be done about them: behaviour.md §3.7 and §3.8, sentence by sentence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from parity import captures

from onnxtrain import Options, ORTModule
from onnxtrain.errors import (
    BackendError,
    CaptureError,
    DeviceError,
    ModuleError,
    OnnxTrainError,
    OptionError,
    UnsupportedDataError,
)
from onnxtrain.options import Fallback


class Taking(torch.nn.Module):
    """Takes the next number of an iterator, which cannot be captured, while ``takes`` is true."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.takes, self.factors = torch.nn.Linear(4, 2), True, iter([1] * 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.takes:
            x = x * next(self.factors)
        return self.linear(x)


class Takes(torch.nn.Module):
    """Takes and returns anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, anything: Any = None) -> Any:
        return self.linear(x)


class Anything:
    """Not a type that a graph can take."""


def x() -> torch.Tensor:
    return torch.randn(3, 4)


def failing(kind: str, **options: Any) -> tuple[ORTModule, tuple[Any, ...]]:
    """A module and arguments that fail in one way."""
    if kind == "data":
        return ORTModule(Takes(), options=Options(**options)), (x(), Anything())
    if kind == "module":
        module = Takes()
        module.linear.register_forward_hook(lambda *_: print())
        return ORTModule(module, options=Options(**options)), (x(),)
    if kind == "device":
        module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Identity())
        module[1].register_buffer("far", torch.ones(2, device="meta"))
        return ORTModule(module, options=Options(**options)), (x(),)
    if kind == "backend":
        module = torch.nn.Sequential(torch.nn.Linear(4, 2).double(), torch.nn.GELU())
        return ORTModule(module, options=Options(backend="onnxruntime", **options)), (x().double(),)
    return ORTModule(Taking(), options=Options(**options)), (x(),)


FAILURES: dict[str, tuple[type[OnnxTrainError], str]] = {
    "device": (DeviceError, "FALLBACK_UNSUPPORTED_DEVICE"),
    "data": (UnsupportedDataError, "FALLBACK_UNSUPPORTED_DATA"),
    "module": (ModuleError, "FALLBACK_UNSUPPORTED_TORCH_MODEL"),
    "capture": (CaptureError, "FALLBACK_UNSUPPORTED_ONNX_MODEL"),
    "backend": (BackendError, "FALLBACK_UNSUPPORTED_ONNX_MODEL"),
}
CATCH_ALL = ("eager", "FALLBACK_FORCE_TORCH_FORWARD", "FALLBACK_FORCE_TORCH_BACKWARD")


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_an_error_unless_its_own_policy_is_chosen(kind: str) -> None:
    error, own = FAILURES[kind]
    for policy in ("error", "FALLBACK_DISABLE", *{name for _, name in FAILURES.values() if name != own}):
        wrapped, args = failing(kind, fallback=policy)
        with pytest.raises(error) as caught:
            wrapped(*args)
        assert caught.value.cure
    for policy in (own, f"FALLBACK_UNSUPPORTED_DATA|{own}", *CATCH_ALL):
        wrapped, args = failing(kind, fallback=policy)
        out = wrapped(*args)
        torch.testing.assert_close(out, wrapped.module(*args))
        out.sum().backward()
        assert next(wrapped.parameters()).grad is not None and captures(wrapped) == (kind == "backend")


def test_it_is_announced_once_with_its_reason_and_persists(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, args = failing("capture", fallback="eager")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(3):
            wrapped(*args)
    messages = [r.getMessage() for r in caplog.records if "falls back" in r.getMessage()]
    assert len(messages) == 1
    assert "reads the iterator factors" in messages[0] and "test_fallback.py" in messages[0]
    assert "from now on" in messages[0]
    assert "runs in eager PyTorch" in wrapped.explain() and "reads the iterator factors" in wrapped.explain()
    wrapped.module.takes = False
    wrapped(*args)
    assert captures(wrapped) == 0


def test_retry_goes_back_to_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, args = failing("capture", fallback="eager", fallback_retry=True)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        wrapped(*args)
        wrapped(*args)
        assert captures(wrapped) == 0
        wrapped.module.takes = False
        wrapped(*args)
    assert captures(wrapped) == 1
    assert sum("falls back" in r.getMessage() for r in caplog.records) == 1


def test_one_input_in_eager_the_others_in_the_graph() -> None:
    wrapped, args = failing("data", fallback="FALLBACK_UNSUPPORTED_DATA", fallback_retry=True)
    wrapped(*args)
    wrapped(x())
    wrapped(*args)
    assert captures(wrapped) == 1


def test_the_users_own_errors_are_no_fallback() -> None:
    class Broken(Takes):
        def forward(self, x: torch.Tensor, anything: Any = None) -> Any:
            raise KeyError("mine")

    wrapped = ORTModule(Broken(), options=Options(fallback="eager"))
    with pytest.raises(KeyError, match="mine"):
        wrapped(x())


def test_bad_initialization_makes_it_the_plain_module(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = torch.jit.script(torch.nn.Linear(4, 2))
    with pytest.raises(ModuleError, match="ScriptModule"):
        ORTModule(scripted)
    wrapped = ORTModule(scripted, options=Options(fallback="FALLBACK_BAD_INITIALIZATION"))
    torch.testing.assert_close(wrapped(torch.ones(1, 4)), scripted(torch.ones(1, 4)))
    with pytest.raises(ModuleError):
        ORTModule(len, options=Options(fallback="eager"))  # type: ignore[arg-type]


def test_devices_are_named() -> None:
    wrapped, args = failing("device")
    with pytest.raises(DeviceError, match=r"one device per model.*cpu.*meta"):
        wrapped(*args)
    wrapped = ORTModule(Takes())
    with pytest.raises(DeviceError, match=r"input 0 is on meta, the model on cpu"):
        wrapped(torch.empty(3, 4, device="meta"))


def test_policies_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_DEVICE")
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", "true")
    options = ORTModule(Takes()).options
    assert options.policy == Fallback.FALLBACK_UNSUPPORTED_DATA | Fallback.FALLBACK_UNSUPPORTED_DEVICE
    assert options.fallback_retry
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    wrapped, args = failing("data", fallback="eager")
    with pytest.raises(UnsupportedDataError):
        wrapped(*args)
    with pytest.raises(OptionError, match="FALLBACK_EVERYTHING"):
        Options(fallback="FALLBACK_EVERYTHING")


def test_numbers_of_the_policies_are_the_predecessors() -> None:
    expected = ["DISABLE", "FORCE_TORCH_FORWARD", "FORCE_TORCH_BACKWARD", "UNSUPPORTED_DEVICE", "UNSUPPORTED_DATA"]
    expected += ["UNSUPPORTED_TORCH_MODEL", "UNSUPPORTED_ONNX_MODEL", "BAD_INITIALIZATION"]
    assert [(f.name, f.value) for f in Fallback] == [(f"FALLBACK_{n}", 2**i) for i, n in enumerate(expected)]
