"""The same artifacts in Python, in Node and in a browser: losses, evaluation and checkpoints agree."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import BROWSERS, LIMIT, installed, served, visit
from example_scripts import EXAMPLES, load_example

from onnxtrain.api import CheckpointState

pytestmark = pytest.mark.slow
FOLDER = EXAMPLES / "anywhere"
STEPS = 50  # two times through the data, so that a second run of as many steps sees what a longer one would
TOLERANCE = 1e-4  # relative, of one loss

example = load_example("anywhere/make_artifacts")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    example.make(folder, steps=STEPS)
    return folder


@pytest.fixture(scope="module")
def run(artifacts: Path) -> dict[str, Any]:
    """How the artifacts are trained, and what Python measured."""
    return json.loads((artifacts / "run.json").read_text())


@pytest.fixture(scope="module")
def longer(artifacts: Path, run: dict[str, Any]) -> list[float]:
    """Python's losses of the second half of a training twice as long."""
    measured, _ = example.train(artifacts, example.load_data(), run | {"steps": 2 * STEPS})
    return measured["losses"][STEPS:]


def need(package: str, *programs: str) -> str:
    """The first of the programs that there is; skips where there is none, or no package, and says so."""
    found = installed(*programs)
    if not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"the npm package {package} is not installed; `make javascript` gets it")
    return found


def start_node(*arguments: Path) -> subprocess.CompletedProcess[str]:
    program = need("onnxruntime-node", "node")
    command = [program, str(FOLDER / "node.mjs"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def train_in_node(*arguments: Path) -> dict[str, Any]:
    done = start_node(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_agreement(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert found["heldOutLoss"] == pytest.approx(expected["heldOutLoss"], rel=TOLERANCE)
    assert abs(found["right"] - expected["right"]) <= 1  # a digit may lie on the border
    assert np.mean(found["losses"][-5:]) < 0.5 * np.mean(found["losses"][:5])


def test_node_trains_as_python_does(artifacts: Path, run: dict[str, Any]) -> None:
    check_agreement(train_in_node(artifacts), run["python"])


def test_python_goes_on_where_node_stopped(
    artifacts: Path, run: dict[str, Any], longer: list[float], tmp_path: Path
) -> None:
    folder = shutil.copytree(artifacts, tmp_path / "from_node")
    train_in_node(artifacts, folder / "checkpoint")
    measured, state = example.train(folder, example.load_data(), run)
    assert measured["losses"] == pytest.approx(longer, rel=TOLERANCE)
    assert state.random["draws"] == 2 * STEPS and state.optimizer["step"].view() == 2 * STEPS


def test_node_goes_on_where_python_stopped(
    artifacts: Path, run: dict[str, Any], longer: list[float], tmp_path: Path
) -> None:
    folder = shutil.copytree(artifacts, tmp_path / "from_python")
    _, state = example.train(artifacts, example.load_data(), run | {"rate": 2e-3})
    kept = {"whole": 1, "real": 1.0, "tiny": 2.5e-7, "large": 2**60, "name": 'Größe "😀"\n', "done": False}
    for name, value in kept.items():
        state.properties[name] = value
    CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    assert train_in_node(folder, tmp_path / "after")["losses"] == pytest.approx(longer, rel=TOLERANCE)
    after = CheckpointState.load_checkpoint(tmp_path / "after")
    assert repr(after.properties.as_dict()) == repr(kept)  # 1.0 is not 1
    assert after.settings == state.settings and after.random["draws"] == 2 * STEPS


def test_node_refuses_a_damaged_checkpoint(artifacts: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifacts, tmp_path / "damaged")
    content = bytearray((folder / "checkpoint").read_bytes())
    content[-1] ^= 1
    (folder / "checkpoint").write_bytes(content)
    done = start_node(folder)
    assert done.returncode != 0 and "the checkpoint is damaged" in done.stderr


def test_a_browser_trains_as_python_does(artifacts: Path, run: dict[str, Any], tmp_path: Path) -> None:
    browser = need("onnxruntime-web", *BROWSERS)
    with served(FOLDER, made=artifacts) as (address, posted):
        result = visit(browser, f"{address}/index.html?artifacts=made&report=result", posted, tmp_path)
    assert "error" not in result, result
    check_agreement(result, run["python"])
