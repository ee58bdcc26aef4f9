"""A script written for onnxruntime-training, whose import lines alone were changed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from example_scripts import EXAMPLES, load_example

from onnxtrain.utils.hooks import GlobalSubscriberManager

pytestmark = pytest.mark.slow
example = load_example("migration")


def both(tmp_path: Path, steps: int, *flags: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    given = ["--steps", str(steps), *flags]
    ours = example.run(example.parse(given), str(tmp_path / "ours.pt"))
    return ours, example.run(example.parse([*given, "--pytorch-only"]), str(tmp_path / "eager.pt"))


@pytest.mark.parametrize(("flags", "steps", "close"), [((), 8, 1e-4), (("--amp",), 4, 2e-2)], ids=["float32", "amp"])
def test_losses_and_checkpoints_are_eagers(flags: tuple[str, ...], steps: int, close: float, tmp_path: Path) -> None:
    ours, eager = both(tmp_path, steps, *flags)
    assert len(ours["losses"]) == steps
    for name in ("losses", "test"):
        assert ours[name] == pytest.approx(eager[name], rel=close), name
    plain = example.NeuralNet(64, 96, 10)
    saved = torch.load(tmp_path / "ours.pt", weights_only=True)["model"]
    assert list(saved) == list(plain.state_dict()) == list(torch.load(tmp_path / "eager.pt")["model"])
    plain.load_state_dict(saved)


def test_every_stage_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", "set by the script")
    model, *_ = example.build(example.parse(["--save-onnx", str(tmp_path)]))
    model(torch.randn(3, 64), labels=torch.tensor([1, 2, 3]))[0].backward()
    stages = ("torch_exported", "optimized_pre_grad", "optimized", "execution_model", "execution_model_backward")
    assert {path.name for path in tmp_path.iterdir()} == {f"digits_{stage}_training.onnx" for stage in stages}


def test_statistics_are_written(tmp_path: Path) -> None:
    both(tmp_path, 4, "--statistics", str(tmp_path / "statistics"))
    for subscription in GlobalSubscriberManager.subscriptions:
        subscription.unsubscribe()
    steps = {kind: sorted(p.name for p in (tmp_path / "statistics" / kind).iterdir()) for kind in ("pt", "ort")}
    assert steps["pt"] == steps["ort"] and "step_0" in steps["ort"]


def test_only_import_lines_differ() -> None:
    text = (EXAMPLES / "migration.py").read_text()
    ours = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and "onnx" in str(node.module)
    ]
    pairs = re.findall(r"# from onnxruntime\.training\.(\S+) import (.+)\n +?from onnxtrain\.(\S+) import (.+)\n", text)
    pairs += re.findall(r"# from onnxruntime\.training\.(\S+) import (.+)\nfrom onnxtrain\.(\S+) import (.+)\n", text)
    assert len(pairs) == len(ours) == 2
    assert all((module, names) == (new, new_names) for module, names, new, new_names in pairs)
