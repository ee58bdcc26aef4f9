"""Options, environment, JSON, logging and dumps: behaviour.md §1.2, §2, §3.11, §3.13 and §3.14."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from onnxtrain import DebugOptions, LogLevel, Options, ORTModule
from onnxtrain.errors import GradientError, OptionError
from onnxtrain.options import ENVIRONMENT, Missing, Variable, from_environment
from onnxtrain.ortmodule.experimental.json_config import load_from_json
from onnxtrain.processes import count, rank

REFERENCE = """
    ONNX_OPSET_VERSION CONV_ALGO_SEARCH FALLBACK_POLICY FALLBACK_RETRY SKIPCHECK_POLICY LOG_LEVEL SAVE_ONNX_PATH
    CACHE_DIR DEEPCOPY_BEFORE_MODEL_EXPORT ENABLE_CUSTOM_AUTOGRAD ALLOW_AUTOGRAD_CHECKPOINT SKIPPED_AUTOGRAD_FUNCTIONS
    ENABLE_COMPUTE_OPTIMIZER ENABLE_SPARSE_OPTIMIZER ENABLE_EMBEDDING_SPARSE_OPTIMIZER PRINT_INPUT_DENSITY
    PRINT_MEMORY_STATS MEMORY_OPT_LEVEL MEMORY_OPT_CONFIG MEMORY_OPT_PROBE_RECOMPUTE_LEVEL
    MEMORY_OPT_PROBE_RECOMPUTE_CONFIG ENABLE_MEMORY_ALLEVIATION ENABLE_MEM_EFFICIENT_GRAD_MGMT USE_TRITON
    TRITON_CONFIG_FILE TRITON_DEBUG ENABLE_TUNING MAX_TUNING_DURATION_MS TUNING_RESULTS_PATH USE_EFFICIENT_ATTENTION
    USE_FLASH_ATTENTION ENABLE_ZERO_STAGE3 ROCM_TEST"""


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def step(wrapped: ORTModule) -> None:
    wrapped(torch.randn(3, 4)).sum().backward()


def test_every_variable_of_the_predecessor_is_in_the_table() -> None:
    ours = {"ORTMODULE_CACHE_VERIFY"}
    assert {v.name for v in ENVIRONMENT} - ours == {f"ORTMODULE_{name}" for name in REFERENCE.split()}
    assert len({v.name for v in ENVIRONMENT}) == len(ENVIRONMENT)


@pytest.mark.parametrize("variable", [v for v in ENVIRONMENT if isinstance(v, Missing)], ids=lambda v: v.name)
def test_what_is_not_built_yet_says_so(variable: Missing) -> None:
    with pytest.raises(OptionError, match=f"{variable.name}=1 is not available yet"):
        from_environment(environ={variable.name: "1"})
    for off in ("", *variable.off):
        assert from_environment(environ={variable.name: off}) == Options()


@pytest.mark.parametrize(
    ("name", "text", "option", "value"),
    [
        ("ONNX_OPSET_VERSION", "21", "opset", 21),
        ("USE_TRITON", "1", "codegen", "auto"),
        ("CONV_ALGO_SEARCH", "exhaustive", "conv_algo_search", "EXHAUSTIVE"),
        ("FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA", "fallback", "FALLBACK_UNSUPPORTED_DATA"),
        ("FALLBACK_RETRY", "yes", "fallback_retry", True),
        ("LOG_LEVEL", "info", "log_level", "INFO"),
        ("ENABLE_CUSTOM_AUTOGRAD", "0", "custom_autograd", False),
        ("ALLOW_AUTOGRAD_CHECKPOINT", "1", "keep_checkpoints", True),
        ("CACHE_DIR", "here", "cache_dir", Path("here")),
        ("CACHE_VERIFY", "1", "cache_verify", True),
        ("ENABLE_COMPUTE_OPTIMIZER", "0", "compute_optimizer", False),
        ("ENABLE_SPARSE_OPTIMIZER", "0", "sparse_optimizer", False),
        ("ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "0", "embedding_sparse_optimizer", False),
        ("PRINT_INPUT_DENSITY", "1", "print_input_density", True),
        ("PRINT_MEMORY_STATS", "1", "print_memory_stats", True),
        ("ENABLE_MEMORY_ALLEVIATION", "Gelu+:1:2", "memory_plans", ("Gelu+:1:2",)),
        ("MEMORY_OPT_CONFIG", "Gelu+:1:-1, Cast+:2:1", "memory_plans", ("Gelu+:1:-1", "Cast+:2:1")),
        ("MEMORY_OPT_LEVEL", "2", "memory_level", 2),
        ("MEMORY_OPT_PROBE_RECOMPUTE_LEVEL", "0", "memory_probe", "0:0"),
        ("MEMORY_OPT_PROBE_RECOMPUTE_CONFIG", "1:1", "memory_probe", "1:1"),
        ("ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1", "segments", "all"),
        ("ENABLE_MEM_EFFICIENT_GRAD_MGMT", "0", "segments", None),
    ],
)
def test_variables_win_over_code(name: str, text: str, option: str, value: Any) -> None:
    assert getattr(from_environment(Options(), {f"ORTMODULE_{name}": text}), option) == value


def test_every_variable_with_an_option_has_a_row_above() -> None:
    rows = {mark.args[1][i][0] for mark in test_variables_win_over_code.pytestmark for i in range(len(mark.args[1]))}
    assert {v.name for v in ENVIRONMENT if isinstance(v, Variable) and v.option} == {
        *(f"ORTMODULE_{row}" for row in rows),
        "ORTMODULE_SAVE_ONNX_PATH",
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ONNX_OPSET_VERSION", "new"),
        ("ONNX_OPSET_VERSION", "17"),
        ("FALLBACK_RETRY", "maybe"),
        ("LOG_LEVEL", "LOUD"),
        ("SKIPCHECK_POLICY", "SKIP_CHECK_EVERYTHING"),
        ("MEMORY_OPT_CONFIG", "Gelu+:1"),
        ("MEMORY_OPT_LEVEL", "3"),
        ("MEMORY_OPT_PROBE_RECOMPUTE_CONFIG", "2:0"),
    ],
)
def test_text_that_cannot_be_read(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        from_environment(environ={f"ORTMODULE_{name}": text})


def test_an_unknown_search_is_a_warning_as_it_was() -> None:
    with pytest.warns(UserWarning, match="HEURISTIC is taken"):
        assert from_environment(environ={"ORTMODULE_CONV_ALGO_SEARCH": "BEST"}).conv_algo_search == "HEURISTIC"


def test_skip_checks_are_read_and_nothing_is_skipped() -> None:
    text = "SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT"
    assert from_environment(environ={"ORTMODULE_SKIPCHECK_POLICY": text}) == Options()


def test_the_folder_of_dumps_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    step(ORTModule(net()))
    assert list(tmp_path.iterdir()) == []
    step(ORTModule(net(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=Path.cwd())))
    names = {p.name for p in tmp_path.iterdir()}
    assert {"net_torch_exported_training.onnx", "net_optimized_training.onnx"} <= names
    for path in tmp_path.iterdir():
        onnx.checker.check_model(onnx.load(path))


def test_evaluation_has_dumps_of_its_own(tmp_path: Path) -> None:
    wrapped = ORTModule(net(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)).eval()
    with torch.no_grad():
        wrapped(torch.randn(3, 4))
    stages = ("torch_exported", "optimized", "execution_model")
    assert {p.name for p in tmp_path.iterdir()} == {f"net_{stage}_inference.onnx" for stage in stages}


def test_the_graph_before_the_gradient_is_there_if_the_gradient_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise GradientError("no gradient")

    monkeypatch.setattr("onnxtrain.compiler.build_gradient", fail)
    with pytest.raises(GradientError):
        step(ORTModule(net(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)))
    assert "net_optimized_pre_grad_training.onnx" in {p.name for p in tmp_path.iterdir()}


def write(path: Path, settings: Any) -> Path:
    path.write_text(json.dumps(settings))
    return path


def test_json_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = ORTModule(net())
    step(wrapped)
    settings = {
        "PropagateCastOps": {"Strategy": "INSERT_AND_REDUCE", "Level": 2, "Allow": ["Softmax"]},
        "UseExternalGPUAllocator": True,
        "EnableCustomAutogradFunction": False,
        "EnableGradAccOptimization": True,
        "UseStaticShape": True,
        "RunSymbolicShapeInference": True,
        "SkipCheck": ["SKIP_CHECK_DISABLED"],
        "DebugOptions": {
            "LogLevel": "ERROR",
            "SaveONNX": True,
            "ONNXPrefix": "net",
            "SaveONNXPath": str(tmp_path / "dumps"),
        },
        "UseMemoryEfficientGradient": True,
        "FallbackPolicy": ["FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_DEVICE"],
        "OnnxOpsetVersion": 21,
    }
    load_from_json(wrapped, write(tmp_path / "a.json", settings))
    assert wrapped.options == Options(
        opset=21,
        custom_autograd=False,
        static_shapes=True,
        cache_casts=True,
        segments="all",
        propagate_cast_ops_strategy="INSERT_AND_REDUCE",
        propagate_cast_ops_level=2,
        propagate_cast_ops_allow=("Softmax",),
        log_level="ERROR",
        save_onnx=tmp_path / "dumps",
        onnx_prefix="net",
        fallback="FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_DEVICE",
    )
    step(wrapped)
    assert "f32[3,4]" in wrapped.graph("captured")
    assert wrapped.eval()(torch.ones(2, 4)).shape == (2, 2)
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "20")
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(write(tmp_path / "b.json", {"UseStaticShape": False})))
    load_from_json(wrapped, tmp_path / "a.json")
    assert not wrapped.options.static_shapes and wrapped.options.opset == 20


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"Unknown": 1}, KeyError),
        ({"DebugOptions": {"Colour": 1}}, KeyError),
        ({"OnnxOpsetVersion": "21"}, OptionError),
        ({"OnnxOpsetVersion": 12}, OptionError),
        ({"FallbackPolicy": ["NONSENSE"]}, OptionError),
        ({"PropagateCastOps": {"Strategy": "FLOOD", "Level": 1}}, OptionError),
        ({"PropagateCastOps": {"Level": 3}}, OptionError),
        ({"PropagateCastOps": {"Allow": [1]}}, OptionError),
        ({"PropagateCastOps": {"Colour": 1}}, KeyError),
        ({"UseMemoryEfficientGradient": 1}, OptionError),
        ([], OptionError),
    ],
)
def test_json_that_cannot_be_used_changes_nothing(settings: Any, error: type[Exception], tmp_path: Path) -> None:
    wrapped = ORTModule(net())
    with pytest.raises(error):
        load_from_json(wrapped, write(tmp_path / "a.json", settings))
    assert wrapped.options == Options()
    with pytest.raises(OptionError, match=r"missing\.json"):
        load_from_json(wrapped, tmp_path / "missing.json")


def test_debug_options_are_read_only() -> None:
    debug = DebugOptions(LogLevel.INFO)
    assert (debug.log_level, debug.save_onnx, debug.onnx_prefix) == (LogLevel.INFO, False, "")
    with pytest.raises(AttributeError):
        debug.log_level = LogLevel.ERROR  # type: ignore[misc]
    assert [level.name for level in LogLevel] == ["VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"]


def test_the_first_step_says_what_it_did_and_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = ORTModule(net(), DebugOptions(LogLevel.INFO))
    with caplog.at_level(logging.INFO, "onnxtrain"):
        for _ in range(3):
            step(wrapped)
        wrapped.eval()(torch.randn(3, 4))
    told = [r.getMessage() for r in caplog.records if "runs as one graph" in r.getMessage()]
    assert "total initialization overhead is" in told[0] and "where export takes" in told[0]
    assert "automatic fallback      off" in told[0] and caplog.records[0].levelno <= logging.WARNING
    by_phase = [r.getMessage() for r in caplog.records if "by phase" in r.getMessage()]
    assert re.search(r"export .* translate .* optimize .* gradient .* plan .* compile", by_phase[0])


@pytest.mark.parametrize(
    ("level", "number", "told"), [("WARNING", 0, True), ("WARNING", 1, False), ("ERROR", 0, False)]
)
@pytest.mark.parametrize("developers", [False])
def test_end_users_levels_are_rank_0s(level: str, number: int, told: bool, developers: bool) -> None:
    assert ("runs as one graph" in _told(level, number)) == told


def test_developers_levels_are_every_ranks() -> None:
    assert "by phase" in _told("DEVINFO", 1)
    assert "by phase" not in _told("INFO", 1) and "by phase" in _told("INFO", 0)


def _told(level: str, number: int) -> str:
    program = """
        import torch
        from onnxtrain import ORTModule
        ORTModule(torch.nn.Linear(2, 2))(torch.ones(3, 2)).sum().backward()
    """
    environment = {"RANK": str(number), "ORTMODULE_LOG_LEVEL": level}
    import os

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_rank() -> None:
    assert count({}) == 1 and count({"WORLD_SIZE": "4"}) == 4
    assert rank({}) == 0 and rank({"RANK": "3"}) == 3


def test_variables_that_do_something_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ortmodule.md").read_text()
    for variable in ENVIRONMENT:
        if isinstance(variable, Variable) and variable.option:
            assert f"`{variable.name}`" in page, variable.name


def test_the_debugger_works_in_a_module_that_is_captured() -> None:
    script = """
        import torch
        from onnxtrain import ORTModule

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(4, 2)

            def forward(self, x):
                breakpoint()
                return self.inner(x)

        print(ORTModule(Net())(torch.ones(3, 4)).shape)
    """
    commands = "p 'columns', x.shape[1]\np self.inner.weight.shape\nc\n"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], input=commands, capture_output=True, text=True, timeout=300
    )
    assert "('columns', 4" in done.stdout, done.stdout + done.stderr  # sizes are numbers to who looks
    assert "torch.Size([2, 4])" in done.stdout, done.stdout + done.stderr
    assert "torch.Size([3, 2])" in done.stdout.splitlines()[-1], done.stdout + done.stderr


def test_options_are_taken_in_the_second_place_too() -> None:
    wrapped = ORTModule(torch.nn.Linear(2, 2), Options(backend="reference"))
    assert wrapped.__dict__["_ort_options"].backend == "reference"


@pytest.mark.parametrize(
    "given",
    [{"options": {"backend": "torch"}}, {"debug_options": "INFO"}, {"debug_options": Options(), "options": Options()}],
)
def test_what_are_no_options_is_said(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"options are a (dict|str|Options), not .*Options"):
        ORTModule(torch.nn.Linear(2, 2), **given)


def test_values_are_taken_as_people_write_them(tmp_path: Path) -> None:
    options = Options(cache_dir=str(tmp_path), save_onnx=str(tmp_path / "dumps"), ignored_attributes=["step"])  # type: ignore[arg-type]
    assert (options.cache_dir, options.save_onnx) == (tmp_path, tmp_path / "dumps")
    assert options.ignored_attributes == ("step",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ignored_attributes": "step"}, "is not a tuple of names"),
        ({"propagate_cast_ops_allow": (1,)}, "is not a tuple of names"),
        ({"cache_dir": 3}, "is not a path"),
        ({"verify": "yes"}, "is neither True nor False"),
        ({"cache_limit": 0.5}, "is not a whole number"),
    ],
)
def test_values_of_another_type_are_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Options(**given)
