"""The page docs/on-device.md: its commands and its blocks are run in order, in a folder with a model and data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import digits
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import api, artifacts, cli, onnxblock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "on-device.md").read_text()
COMMANDS = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model and the data that the page speaks of, where its commands are run."""
    monkeypatch.chdir(tmp_path)
    onnx.save(digits.network(), tmp_path / "model.onnx")
    digits.write(tmp_path, samples=200)
    (tmp_path / "train.npz").rename(tmp_path / "digits.npz")
    return tmp_path


@pytest.mark.parametrize("page", ["docs/on-device.md", "README.md"])
def test_commands_run(folder: Path, page: str) -> None:
    commands = COMMANDS.findall((ROOT / page).read_text())[0].splitlines()
    assert [shlex.split(line)[:2] for line in commands] == [["onnxtrain", c] for c in ("artifacts", "train", "export")]
    for line in commands:
        assert cli.main(shlex.split(line)[1:]) == 0
    session = ort.InferenceSession(folder / "trained.onnx", providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == ["scores"]


def test_blocks_run_in_order(folder: Path) -> None:
    data = np.load("digits.npz")
    names = {"images": data["image"], "labels": data["labels"]}
    for block in BLOCKS.findall(PAGE):
        exec(compile(block, "on-device.md", "exec"), names)
    assert names["optimizer"].updates == 50 and names["schedule"]._record["step"] == 50
    assert names["weights"]["optimizer/step"] == 50
    assert np.abs(names["gradient"]).max() > 0
    half = names["module"].get_contiguous_parameters(trainable_only=True).numpy()
    np.testing.assert_array_equal(half, names["vector"] * np.float32(0.5))
    outputs = {p: onnx.load(p).graph.output[0].name for p in ("trained.onnx", "features.onnx")}
    assert outputs == {"trained.onnx": "scores", "features.onnx": "hidden"}
    assert {i.name for i in onnx.load("distilled/training_model.onnx").graph.input} >= {"labels", "teacher"}


def test_names_of_the_page_exist() -> None:
    for name in re.findall(r"onnxblock\.(?:loss|optim)\.(\w+)\(", PAGE):
        assert hasattr(onnxblock.loss, name) or hasattr(onnxblock.optim, name), name
    for name in ("TrainingBlock", "ForwardBlock", "base", "empty_base", "blocks", "loss", "optim"):
        assert f"`{name}`" in PAGE or f"`onnxblock.{name}`" in PAGE
        assert hasattr(onnxblock, name)
    listed = re.search(r"training\.api import (.*?)`", PAGE)
    assert listed is not None
    assert all(hasattr(api, name) for name in listed.group(1).split(", "))
    assert callable(artifacts.seal)
