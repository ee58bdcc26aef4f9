"""How the backend is found, what it is told, and what it says."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from compiled import compiled, piece
from torch._dynamo.exc import BackendCompilerFailed

import onnxtrain.torchdynamo
from onnxtrain import Options
from onnxtrain.errors import DeviceError, OnnxTrainError, OptionError
from onnxtrain.torchdynamo import explain, pieces
from onnxtrain.torchdynamo.settings import settings


def test_torch_lists_the_backend_and_finds_it() -> None:
    assert {"onnxtrain", "onnxrt"} <= set(torch._dynamo.list_backends())
    assert torch._dynamo.lookup_backend("onnxtrain") is onnxtrain.torchdynamo.onnxtrain
    assert torch._dynamo.lookup_backend("onnxrt") is onnxtrain.torchdynamo.onnxrt


def test_an_installed_package_says_where_the_backend_is() -> None:
    """The project's file states what an installation of it does."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in ("onnxtrain", "onnxrt"):
        assert f'{name} = "onnxtrain.torchdynamo:{name}"' in text
    for found in entry_points(group=onnxtrain.torchdynamo.GROUP):
        if found.name in ("onnxtrain", "onnxrt"):
            assert found.load() is getattr(onnxtrain.torchdynamo, found.name)


def test_options_are_those_of_ormodule() -> None:
    made = settings("max-autotune", {"cache_dir": "kept", "ignored_attributes": ["step"], "strict": True})
    assert made.cache_dir == Path("kept") and made.ignored_attributes == ("step",) and made.strict
    assert made.conv_algo_search == "EXHAUSTIVE" and settings("reduce-overhead") == Options() == settings()
    assert settings(options=Options(opset=21)).opset == 21


@pytest.mark.parametrize(
    ("given", "message"),
    [({"options": {"bakend": "torch"}}, "close names: backend"), ({"mode": "fast"}, "choose one of default")],
)
def test_what_is_not_known_is_refused(given: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        settings(**given)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(torch.nn.Linear(2, 2), backend="onnxtrain", **given)(torch.zeros(2, 2))


@pytest.mark.parametrize("name", ["torch", "onnxruntime", "reference"])
def test_every_backend_trains(name: str) -> None:
    layer = torch.nn.Linear(4, 2)
    compiled(lambda x: layer(x).tanh().sum(), backend=name)(x := torch.randn(3, 4)).backward()
    expected = torch.autograd.grad(layer(x).tanh().sum(), list(layer.parameters()))
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(expected), rtol=1e-4, atol=1e-6)
    assert name.split("onnx")[0] in type(piece()._session().bound.latest.executable).__name__.lower()


def test_several_devices_are_refused() -> None:
    layer = torch.nn.Linear(4, 2)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), y * 2

    with pytest.raises(DeviceError, match="on meta"):
        compiled(function)(torch.randn(3, 4), torch.zeros(3, device="meta"))


def test_eager_pytorch_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    layer = torch.nn.Linear(4, 2)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), torch.linalg.eig(layer.weight[:, :2])[0].abs()

    def step(**options: object) -> torch.Tensor:
        return compiled(function, backend="onnxruntime", **options)(torch.ones(3, 4))[0]

    with pytest.raises(OnnxTrainError):
        step()
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        torch.testing.assert_close(step(fallback="eager"), layer(torch.ones(3, 4)))
    assert "falls back to eager PyTorch" in caplog.text and "runs in eager PyTorch" in explain()


def test_pieces_are_those_of_a_module() -> None:
    layers = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())]
    torch._dynamo.reset()
    assert pieces() == [] and "no piece yet" in explain()
    for layer in layers:
        torch.compile(layer, backend="onnxtrain")(torch.randn(2, 4))
    assert len(pieces()) == 2 and [len(pieces(layer)) for layer in layers] == [1, 1]
    assert "piece 1: " in explain(layers[0]) and "1 call, 1 graph" in explain(layers[0])
    assert "def forward" in pieces(layers[0])[0].source()


def test_verify_compares_a_first_step() -> None:
    layer = torch.nn.Linear(4, 4)
    compiled(lambda x: layer(x).tanh().sum(), verify=True)(torch.randn(3, 4)).backward()
    report = piece()._session().bound.verification
    assert report is not None and report.comparisons


def test_a_second_process_needs_no_trace(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    for program in (torch.tanh, torch.relu, torch.tanh):
        made = compiled(lambda x, f=program: f(layer(x)).sum(), cache_dir=str(tmp_path))
        torch.testing.assert_close(made(x), program(layer(x)).sum())
