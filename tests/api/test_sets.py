"""Artifacts are a set: one id in all files, checked; they appear at once or not at all, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import digits
import numpy as np
import onnx
import pytest

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.checkpoint import read
from onnxtrain.errors import ArtifactError, CheckpointError, OnnxTrainError, WriteError
from onnxtrain.files import write_atomically, write_set
from onnxtrain.portable import facts_of

ROWS = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
LABELS = np.arange(8)
MODELS = ("training_model", "eval_model", "optimizer_model")


def make(folder: Path, hidden: int = 16, seed: int = 0, **options: object) -> dict[str, Path]:
    given = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.SGD, **options}
    return generate_artifacts(digits.network(hidden, seed), artifact_directory=folder, **given)  # type: ignore[arg-type]


def ids(paths: dict[str, Path]) -> set[str]:
    found = {read(paths[kind]).set_id for kind in paths if "checkpoint" in kind}
    for kind in (k for k in MODELS if k in paths):
        found.add((facts_of({p.key: p.value for p in onnx.load(paths[kind]).metadata_props}) or {})["set"])
    return found


def train(paths: dict[str, Path]) -> float:
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state, paths["eval_model"])
    optimizer = Optimizer(paths["optimizer_model"], module)
    first = float(module(ROWS, LABELS))
    optimizer.step()
    return first


def test_the_id_is_of_model_and_options_and_not_of_weights(tmp_path: Path) -> None:
    one = make(tmp_path / "one", nominal_checkpoint=True)
    assert len(ids(one)) == 1
    assert ids(one) == ids(make(tmp_path / "again")) == ids(make(tmp_path / "weights", seed=1))
    others = [make(tmp_path / "wide", 17), make(tmp_path / "adam", optimizer=OptimType.Adam)]
    others.append(make(tmp_path / "frozen", frozen_params=["first*"]))
    assert len({*ids(one)}.union(*map(ids, others))) == 4


def test_the_id_does_not_depend_on_the_process(tmp_path: Path) -> None:
    code = "import sys; sys.path.append(sys.argv[1]); from test_sets import *; print(*ids(make(Path(sys.argv[2]))))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, (tests, tests.parent)), *sys.path])
    command = [sys.executable, "-c", code, str(tests), str(tmp_path / "there")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert found == [*ids(make(tmp_path / "here"))]


def test_files_of_two_sets_are_refused(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", optimizer=OptimType.Adam)
    module = Module(one["training_model"], CheckpointState.load_checkpoint(one["checkpoint"]))
    for use in (
        lambda: Module(one["training_model"], CheckpointState.load_checkpoint(two["checkpoint"])),
        lambda: Module(one["training_model"], module.state, two["eval_model"]),
        lambda: Optimizer(two["optimizer_model"], module),
    ):
        with pytest.raises(
            OnnxTrainError, match=r"one\W.* is of the set \w{12}, .*two\W.* of the set \w{12}(.|\n)*cure"
        ):
            use()


def test_weights_of_another_set_are_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", seed=1), make(tmp_path / "two", optimizer=OptimType.Adam)
    state = CheckpointState.load_checkpoint(one["checkpoint"], of_any_set=True)
    module = Module(two["training_model"], state, two["eval_model"])
    assert float(module(ROWS, LABELS)) == train(one)
    CheckpointState.save_checkpoint(state, tmp_path / "trained")
    assert {read(tmp_path / "trained").set_id} == ids(two)
    narrow = make(tmp_path / "narrow", 8)
    with pytest.raises(CheckpointError, match=r"first_weight is .* in the state"):
        Module(narrow["training_model"], CheckpointState.load_checkpoint(one["checkpoint"], of_any_set=True))


def test_models_without_an_id_are_compared_by_their_form(tmp_path: Path) -> None:
    def composed(hidden: int) -> tuple[dict[str, bytes], CheckpointState]:
        from onnxtrain.portable import sealed

        class Training(onnxblock.TrainingBlock):
            def build(self, name: str) -> str:
                return onnxblock.loss.CrossEntropyLoss()(name)

        block, optimizer = Training(), onnxblock.optim.SGD()
        with onnxblock.base(digits.network(hidden)):
            block.requires_grad("*")
            block("scores")
            models = dict(zip(("training", "eval"), map(sealed, block.to_model_proto()), strict=True))
        with onnxblock.empty_base():
            optimizer(block.parameters()[0])
            models["optimizer"] = sealed(optimizer.to_model_proto())
        onnxblock.save_checkpoint(block.parameters(), tmp_path / f"{hidden}")
        return models, CheckpointState.load_checkpoint(tmp_path / f"{hidden}")

    (models, state), (others, _) = composed(8), composed(9)
    module = Module(models["training"], state, models["eval"])
    Optimizer(models["optimizer"], module)
    assert module(ROWS, LABELS) > 0
    with pytest.raises(ArtifactError, match=r"first_bias has another form"):
        Module(models["training"], state, others["eval"])
    with pytest.raises(ArtifactError, match=r"first_weight is .* in the optimizer model"):
        Optimizer(others["optimizer"], module)


def test_a_set_takes_the_place_of_all_of_the_set_before(tmp_path: Path) -> None:
    make(tmp_path, nominal_checkpoint=True, ort_format=True)
    make(tmp_path, prefix="own_")
    (tmp_path / "trained_checkpoint").write_bytes(b"the user's")
    make(tmp_path, optimizer=None)
    names = {"training_model.onnx", "eval_model.onnx", "checkpoint", "trained_checkpoint"}
    own = {f"own_{k}.onnx" for k in MODELS} | {"own_checkpoint"}
    assert {p.name for p in tmp_path.iterdir()} == names | own


def test_what_fails_leaves_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make(tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        for place in ("_flush", "_place"):

            def fail(*_: object, error: BaseException = error) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(f"onnxtrain.files.{place}", fail)
                with pytest.raises(WriteError if isinstance(error, OSError) else KeyboardInterrupt):
                    make(tmp_path / "run", 8)
            assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    assert train(paths) > 0


def test_ctrl_c_while_files_are_put_in_place_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the marker on the new set is there; renames that were interrupted are done by whoever opens it."""
    make(tmp_path)
    expected = ids(make(tmp_path.with_name("other"), 8))
    rename, count = Path.replace, [0]

    def interrupted(path: Path, target: Path) -> Path:
        count[0] += 1
        if count[0] % 2 == 0:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, 8)
    paths = {k: tmp_path / f"{k}.onnx" for k in MODELS} | {"checkpoint": tmp_path / "checkpoint"}
    assert train(paths) > 0 and ids(paths) == expected
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in paths.values()}


def _make_forever(folder: Path) -> None:
    """What a child does until it is killed: two sets in turn, one of them with twins of each model."""
    contents = [{p.name: p.read_bytes() for p in (folder / kind).iterdir()} for kind in ("one", "two")]
    while True:
        for files in contents:
            write_set(folder / "run", "", files, ["nominal_checkpoint"] if "nominal_checkpoint" not in files else [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_a_kill_at_any_moment_leaves_the_old_set_or_the_new(tmp_path: Path) -> None:
    draw, sets, marked = random.Random(0), set(), 0
    loss = {train(make(tmp_path / "one", 8, nominal_checkpoint=True)), train(make(tmp_path / "two", 9))}
    expected = [{p.name for p in (tmp_path / kind).iterdir()} for kind in ("one", "two")]
    paths = make(tmp_path / "run", 8, nominal_checkpoint=True)
    contents = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    started = time.perf_counter()
    write_set(tmp_path / "run", "", contents)
    write_set(tmp_path / "run", "", contents)
    longest = 2 * (time.perf_counter() - started)
    for tried in range(2000):  # a busy machine kills most of them before they begin
        if tried >= 100 and sets == loss and marked:
            break
        child = os.fork()
        if child == 0:
            try:
                _make_forever(tmp_path)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        marked += any((tmp_path / "run").glob(".*commit"))
        found = train({k: p for k, p in paths.items() if k != "nominal_checkpoint"})
        assert found in loss
        sets.add(found)
        names = {p.name for p in (tmp_path / "run").iterdir() if not p.name.endswith(".partial")}
        assert names in expected
    assert sets == loss and marked, "no kill was while files were put in place"
    make(tmp_path / "run", 9)
    assert {p.name for p in (tmp_path / "run").iterdir()} == expected[1], "what the kills left is still there"


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "checkpoint"
    living, dead = (tmp_path / f".checkpoint.{name}.partial" for name in ("living", "dead"))
    dead.write_bytes(b"")
    with living.open("wb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        write_atomically(path, b"new")
        assert {p.name for p in tmp_path.iterdir()} == {path.name, living.name}
    write_atomically(path, b"newer")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_links_and_modes_stay(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "weights", tmp_path / "checkpoint"
    real.write_bytes(b"old")
    real.chmod(0o600)
    link.symlink_to("disk/weights")
    write_atomically(link, b"new")
    assert link.is_symlink() and real.read_bytes() == b"new" and real.stat().st_mode & 0o777 == 0o600
    link.unlink()
    link.symlink_to("disk/not_yet")
    write_atomically(link, b"first")
    assert (tmp_path / "disk" / "not_yet").read_bytes() == b"first" and link.is_symlink()
    paths = make(tmp_path / "run")
    paths["checkpoint"].chmod(0o640)
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    CheckpointState.save_checkpoint(state, paths["checkpoint"])
    assert paths["checkpoint"].stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"become": {".a.partial": "../b"}, "gone": []}',
        b'{"become": {}, "gone": ["/etc/passwd"]}',
        b'{"become": {"model": "checkpoint"}, "gone": []}',
        b'{"become": {}, "gone": [".."]}',
        b" " * 2**17,
    ],
)
def test_markers_that_are_not_ours_are_errors(tmp_path: Path, content: bytes) -> None:
    paths = make(tmp_path)
    (tmp_path / ".artifacts.commit").write_bytes(content)
    for use in (lambda: CheckpointState.load_checkpoint(paths["checkpoint"]), lambda: make(tmp_path)):
        with pytest.raises(ArtifactError, match=r"artifacts.commit is (damaged|larger)(.|\n)*cure: remove"):
            use()
