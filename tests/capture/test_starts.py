"""Starts without a trace: what a call reads is found again in another process, and whatever changes it is missed."""

from __future__ import annotations

import contextlib
import copy
import cProfile
import functools
import logging
import os
import random
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain import Options, ORTModule
from onnxtrain.capture import Answers
from onnxtrain.capture.readings import UnreadableError, reading
from onnxtrain.compiler import Report, capture_module

SCALE = 2.0
TABLE = {"scales": [1.0, 2.0], "names": ("a", "b")}
WEIGHT = torch.arange(4.0)
ARRAY = numpy.ones(3000)
NORM = torch.nn.LayerNorm(4).requires_grad_(False)
LIMITS = types.SimpleNamespace(longest=64, inner=types.SimpleNamespace(shift=0.5))


def helper(x: torch.Tensor, factor: float = 3.0, *, offset: float = 0.0) -> torch.Tensor:
    return inner(x) * factor + offset


def inner(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def finished(x: torch.Tensor) -> torch.Tensor:
    return x


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def counted(start: float) -> Callable[[torch.Tensor], torch.Tensor]:
    options = {"start": start}

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + options["start"]

    return add


def decorated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        for _ in range(times):
            result = function(*args)
        return result

    return run


class Config:
    def __init__(self) -> None:
        self.eps, self.sizes, self.inner = 1e-5, [1, 2], types.SimpleNamespace(deep=types.SimpleNamespace(rate=0.1))


class Layer(torch.nn.Module):
    shift = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.config, self.index, self.window = config, 0, (1, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.constant = torch.ones(4)
        self.act = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.linear(x)) * self.config.eps + self.shift + self.constant + self.seen
        return y if x.shape[0] > self.config.inner.deep.rate else -y


class Net(torch.nn.Module):
    """Reads attributes, configuration, globals, closures, defaults and the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(Config()) for _ in range(2))
        self.add, self.run = counted(1.0), decorated(helper, 1)
        self.partial = functools.partial(helper, factor=2.0)
        self.rate = 0.5

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.add(self.run(x)) * SCALE * scale + self.partial(x) + WEIGHT * ARRAY[0] + TABLE["scales"][1]
        if x.shape[0] < LIMITS.longest:  # which no call of this size tells from a higher limit
            x = x + LIMITS.inner.shift
        if os.environ.get("ONNXTRAIN_TEST_SIGN") == "-":
            x = -x
        return finished(F.dropout(NORM(x), self.rate, self.training))


def digest(module: Net, *args: Any, **kwargs: Any) -> str:
    return reading(module, args or (torch.zeros(3, 4),), kwargs).digest


def _set(path: str, value: Any) -> Callable[[Net, pytest.MonkeyPatch], None]:
    """A mutation: an attribute of the module, or of what it holds, gets another value."""

    def change(module: Net, _: pytest.MonkeyPatch) -> None:
        *names, last = path.split(".")
        owner: Any = module
        for name in names:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
        setattr(owner, last, value)

    return change


def _global(name: str, value: Any, owner: Any = None) -> Callable[[Net, pytest.MonkeyPatch], None]:
    """A mutation: a name of this module, or an attribute of something global, gets another value."""
    return lambda _, patch: patch.setattr(owner or sys.modules[__name__], name, value)


def _do(change: Callable[[Net], Any]) -> Callable[[Net, pytest.MonkeyPatch], None]:
    return lambda module, _: change(module)


def _environment(value: str) -> Callable[[Net, pytest.MonkeyPatch], None]:
    return lambda _, patch: patch.setenv("ONNXTRAIN_TEST_SIGN", value)


def _layer(module: Net) -> Any:
    return module.layers[0]


def _cell(function: Any) -> Any:
    return function.__closure__[0].cell_contents


def _other(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


def _other_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.act(self.linear(x))


def _same_but_for_a_constant(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.act(self.linear(x)) * self.config.eps + self.shift + self.constant + self.seen
    return y if x.shape[0] > self.config.inner.deep.rate + 1 else -y


class _Relu(torch.nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


MUTATIONS: dict[str, Callable[[Net, pytest.MonkeyPatch], None]] = {
    # attributes of modules
    "number": _set("rate", 0.25),
    "int that was a float": _set("rate", 1),
    "number of a layer": _set("layers.1.index", 1),
    "tuple": _set("layers.0.window", (1, 3)),
    "new attribute": _set("layers.0.extra", 1),
    "removed attribute": _do(lambda m: delattr(m.layers[0], "window")),
    "constant tensor": _set("layers.0.constant", torch.full((4,), 2.0)),
    "constant tensor changed in place": _do(lambda m: _layer(m).constant.add_(1)),
    "constant of another dtype": _set("layers.0.constant", torch.ones(4, dtype=torch.float64)),
    "mode of all": _do(lambda m: m.eval()),
    "mode of one": _do(lambda m: m.layers[1].act.eval()),
    "attribute of a class": _global("shift", 2.0, Layer),
    # configuration
    "configuration": _set("layers.0.config.eps", 1e-6),
    "list of a configuration": _do(lambda m: _layer(m).config.sizes.append(3)),
    "deep configuration": _set("layers.0.config.inner.deep.rate", 0.2),
    "configuration that layers share": _do(lambda m: setattr(m.layers[1], "config", m.layers[0].config)),
    # structure
    "more layers": _do(lambda m: m.layers.append(Layer(Config()))),
    "fewer layers": _do(lambda m: m.layers.__delitem__(1)),
    "one layer twice": _do(lambda m: m.layers.__setitem__(1, m.layers[0])),
    "other module": _do(lambda m: setattr(m.layers[0], "act", torch.nn.Tanh())),
    "subclass of a module": _do(lambda m: setattr(m.layers[0], "act", _Relu())),
    "attribute of torch's module": _set("layers.0.act.inplace", True),
    "no bias": _do(lambda m: setattr(m.layers[0].linear, "bias", None)),
    "frozen parameter": _do(lambda m: m.layers[0].linear.weight.requires_grad_(False)),
    "tied parameters": _do(lambda m: setattr(m.layers[1].linear, "weight", m.layers[0].linear.weight)),
    "parameter of another dtype": _do(lambda m: m.double()),
    "buffer of another form": _do(lambda m: setattr(m.layers[0], "seen", torch.zeros(1))),
    "buffer gone": _do(
        lambda m: (
            setattr(m.layers[0], "seen", torch.nn.Parameter(torch.zeros(4)))
            if m.layers[0]._buffers.pop("seen") is not None
            else None
        )
    ),
    "forward hook": _do(lambda m: m.layers[0].register_forward_hook(lambda *_: None)),
    "forward pre-hook": _do(lambda m: m.layers[0].register_forward_pre_hook(lambda *_: None)),
    # code
    "method of a class": _global("forward", _other_layer, Layer),
    "size compared with another number": _global("forward", _same_but_for_a_constant, Layer),
    "assigned forward": _do(lambda m: setattr(m.layers[0], "forward", functools.partial(_other_layer, m.layers[0]))),
    "function": _global("finished", doubled),
    "function that a function calls": _global("inner", _other),
    "function of torch": _global("gelu", F.relu, F),
    "method of tensors": _global("__add__", lambda x, y: x.sub(-y), torch.Tensor),
    "default": _global("__defaults__", (4.0,), helper),
    "keyword default": _global("__kwdefaults__", {"offset": 1.0}, helper),
    "code of a function": _global("__code__", _other.__code__, inner),
    # closures, decorators, partial functions
    "closure": _do(lambda m: setattr(m, "add", counted(2.0))),
    "closure changed in place": _do(lambda m: _cell(m.add).update(start=3.0)),
    "decorator": _do(lambda m: setattr(m, "run", decorated(helper, 2))),
    "decorated function": _do(lambda m: setattr(m, "run", decorated(inner, 1))),
    "partial function": _do(lambda m: setattr(m, "partial", functools.partial(helper, factor=4.0))),
    "lambda": _do(lambda m: setattr(m, "add", lambda x: x)),
    # globals
    "global number": _global("SCALE", 3.0),
    "global number of another type": _global("SCALE", 2),
    "global table": _do(lambda _: None),  # set below
    "global tensor": _global("WEIGHT", torch.zeros(4)),
    "element of an array": _global("ARRAY", numpy.where(numpy.arange(3000) == 1500, 2.0, 1.0)),
    "global module": _global("NORM", torch.nn.LayerNorm(4, eps=1e-3)),
    "content of a global module": _global("NORM", torch.nn.LayerNorm(4, elementwise_affine=False)),
    "limit that this call does not reach": _global("longest", 32, LIMITS),
    "deep global": _global("shift", 0.25, LIMITS.inner),
    # environment
    "environment": _environment("-"),
    "environment without effect": _environment("+"),
}
MUTATIONS["global table"] = lambda _, patch: patch.setitem(TABLE, "scales", [1.0, 3.0])

CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "size": lambda: ((torch.zeros(4, 4),), {}),
    "dtype": lambda: ((torch.zeros(3, 4, dtype=torch.float64),), {}),
    "rank": lambda: ((torch.zeros(1, 3, 4),), {}),
    "requires_grad": lambda: ((torch.zeros(3, 4, requires_grad=True),), {}),
    "number": lambda: ((torch.zeros(3, 4),), {"scale": 2.0}),
    "type of a number": lambda: ((torch.zeros(3, 4),), {"scale": 1}),
}


def test_what_is_read_is_the_same_again() -> None:
    torch.manual_seed(0)
    first = Net()
    wanted = digest(first)
    assert digest(copy.deepcopy(first)) == wanted
    for parameter in first.parameters():  # weights are inputs of a graph
        parameter.data.add_(1)
    first.layers[0].seen.add_(1)  # type: ignore[operator]
    assert digest(first) == wanted


@pytest.mark.parametrize("name", MUTATIONS)
def test_whatever_a_call_reads_is_missed_when_it_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    monkeypatch.setattr(sys.modules[__name__], "LIMITS", LIMITS)
    wanted = digest(module)
    MUTATIONS[name](module, monkeypatch)
    try:
        found = digest(module)
    except (RuntimeError, AttributeError, TypeError):  # it does not run any longer: nothing is recalled
        return
    assert found != wanted


@pytest.mark.parametrize("name", CALLS)
def test_another_call_is_another_start(name: str, tmp_path: Path) -> None:
    module = Net().double() if name == "dtype" else Net()
    captured(module, tmp_path, torch.zeros(3, 4))
    args, kwargs = CALLS[name]()
    report = Report()
    capture_module(module, args, kwargs, Options(cache_dir=tmp_path), report, None, Answers())
    assert "export" in report.seconds


def captured(module: torch.nn.Module, folder: Path, x: torch.Tensor, **options: Any) -> tuple[Any, Report]:
    report = Report()
    made = capture_module(module, (x,), {}, Options(cache_dir=folder, **options), report, None, Answers())
    return made, report


@pytest.fixture(autouse=True)
def no_spot_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.capture.starts._CHECKED", 0.0)


def test_a_second_start_does_not_trace(tmp_path: Path) -> None:
    first, report = captured(Net(), tmp_path, torch.ones(3, 4))
    assert "export" in report.seconds
    second, report = captured(Net(), tmp_path, torch.ones(3, 4))
    assert "export" not in report.seconds
    assert first.outputs == second.outputs
    assert first.guards == second.guards
    assert first.graph.signature == second.graph.signature


def test_a_start_that_is_verified_traces_and_finds_what_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(Net(), tmp_path, torch.ones(3, 4))
    _, report = captured(Net(), tmp_path, torch.ones(3, 4), cache_verify=True)
    assert "export" in report.seconds
    assert not told(caplog)
    always = reading(Net(), (torch.ones(3, 4),), {})
    monkeypatch.setattr("onnxtrain.capture.starts.reading", lambda *_: always)  # as if nothing were read
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 5.0)
    with caplog.at_level(logging.ERROR):
        _, report = captured(Net(), tmp_path, torch.ones(3, 4), cache_verify=True)
    assert "is not what the module computes" in caplog.text
    caplog.clear()
    captured(Net(), tmp_path, torch.ones(3, 4), cache_verify=True)
    assert not told(caplog)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("onnxtrain") and r.levelno >= logging.WARNING]


def test_some_starts_are_verified_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(Net(), tmp_path, torch.ones(3, 4))
    monkeypatch.setattr("onnxtrain.capture.starts._CHECKED", 1.0)
    _, report = captured(Net(), tmp_path, torch.ones(3, 4))
    assert "export" in report.seconds


def test_what_lies_deep_is_seen() -> None:
    module, deep = Net(), types.SimpleNamespace(rate=1)
    held: Any = deep
    for _ in range(20):
        held = types.SimpleNamespace(held=[held])
    module.held = held
    wanted = digest(module)
    assert digest(module) == wanted
    deep.rate = 2
    assert digest(module) != wanted


def test_what_is_too_much_is_not_described() -> None:
    module = Net()
    module.held = [[i] for i in range(60_000)]  # type: ignore[assignment]
    with pytest.raises(UnreadableError, match="more than"):
        digest(module)
    module.held = torch.eye(4).to_sparse()
    with pytest.raises(UnreadableError, match="sparse"):
        digest(module)


class Reads(torch.nn.Module):
    """Does what no digest tells: reads a file, or looks at its input."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = torch.nn.Linear(4, 4), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "file":
            return self.linear(x) * float(Path(__file__).read_bytes()[0])
        return self.linear(x) if x.sum() > 0 else x


def test_what_cannot_be_told_is_traced(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"test_starts.py:\d+ reads a file"):
        reading(Reads("file"), (torch.ones(3, 4),), {})
    for _ in range(2):
        _, report = captured(Reads("file"), tmp_path, torch.ones(3, 4))
        assert "export" in report.seconds
    with pytest.raises(RuntimeError):
        reading(Reads("content"), (torch.ones(3, 4),), {})


def test_a_profiler_is_left_alone() -> None:
    seen = []
    sys.setprofile(lambda *event: seen.append(event))
    try:
        with pytest.raises(UnreadableError, match="profiler"):
            reading(Net(), (torch.ones(3, 4),), {})
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)


def test_the_profile_of_a_first_step_is_whole() -> None:
    model, profile = ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())), cProfile.Profile()
    with profile:
        model(torch.ones(3, 4)).sum().backward()
        copy.deepcopy(TABLE)
    assert any(entry.code is copy.deepcopy.__code__ for entry in profile.getstats())


SHIFT = 1.0


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x + SHIFT


class _Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*(x.as_subclass(torch.Tensor) if isinstance(x, cls) else x for x in args), **(kwargs or {}))
        return _shifted(made) if func is torch.Tensor.mul else made


MARKED = torch.ones(4).as_subclass(_Subclass)  # type: ignore[arg-type]


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return _shifted(made) if func is torch.tanh else made


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return _shifted(made) if "tanh" in str(func) else made


class _Within(torch.nn.Module):
    """Its code runs within functions of torch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.weight = what, torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "subclass":
            return torch.tanh((x * self.weight).mul(MARKED))
        if self.what == "dispatch mode":
            with _DispatchMode():
                return torch.tanh(x * self.weight)
        if self.what == "hook of autograd":
            with torch.autograd.graph.saved_tensors_hooks(_shifted, lambda x: x):
                return torch.tanh(x * self.weight)
        return torch.tanh(x * self.weight)


@pytest.mark.parametrize("what", ["subclass", "function mode", "dispatch mode", "hook of autograd"])
def test_code_that_functions_of_torch_run_is_read(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for shift in (1.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "SHIFT", shift)
        with _FunctionMode() if what == "function mode" else contextlib.nullcontext():
            found.append(digest(_Within(what)))  # type: ignore[arg-type]
    assert found[0] != found[1]


def test_reading_leaves_no_trace() -> None:
    module = Net()
    module.layers[0] = torch.nn.BatchNorm1d(4)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(3, 4)
    module.add = lambda x: x * random.random() + numpy.random.rand()  # type: ignore[assignment]
    numbers, others = torch.get_rng_state(), (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[index]
    reading(module, (x,), {})
    assert torch.equal(torch.get_rng_state(), numbers)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == others  # type: ignore[index]
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)
    assert sys.getprofile() is None


SCRIPT = """
    import sys
    import torch
    from onnxtrain import ORTModule
    from onnxtrain.capture import starts
    from {module} import Model

    starts._CHECKED = 0.0  # of the starts that trace all the same, at random
    torch.manual_seed(0)
    model = ORTModule(Model())
    loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    (entry,) = model.__dict__["_ort_sessions"].entries
    print("traced" if "export" in entry.session.bound.report.seconds else "recalled", float(loss))
"""
MODEL = """
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            if torch.compiler.is_exporting():
                return self.traced(x)
            return self.linear(x)

        def traced(self, x):
            return self.linear(x) * 1
"""


def test_another_process_starts_without_a_trace_until_a_file_changes(tmp_path: Path) -> None:
    """The file is of a function that only a trace runs."""
    (tmp_path / "models.py").write_text(textwrap.dedent(MODEL))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(module="models")))
    environment = os.environ | {"ORTMODULE_CACHE_DIR": str(tmp_path / "graphs"), "PYTHONHASHSEED": "random"}

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        )
        assert "FutureWarning" not in done.stderr
        return done.stdout.split()

    first, second = run(), run()
    assert (first[0], second[0]) == ("traced", "recalled")
    assert first[1] == second[1]
    (tmp_path / "models.py").write_text(textwrap.dedent(MODEL).replace("* 1", "* 2"))
    third = run()
    assert third[0] == "traced"
    assert third[1] != first[1]
