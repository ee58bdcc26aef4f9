"""The command line: artifacts, train and export of a network from .onnx; kills, resumption and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import digits
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import cli, onnxblock
from onnxtrain.api import CheckpointState
from onnxtrain.artifacts import LossType, OptimType
from onnxtrain.checkpoint import read

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network's artifacts, and data of 400 digits."""
    made = tmp_path_factory.mktemp("digits")
    onnx.save(digits.network(), made / "model.onnx")
    digits.write(made, samples=400)
    command = ["artifacts", "model.onnx", "--loss", "cross_entropy", "--optimizer", "adamw", "--output", "scores"]
    assert run(made, *command, "--out", "run")[0] == 0
    return made


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command in a folder, in this process; status and what it printed."""
    import contextlib
    import io

    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.main(arguments)
            except SystemExit as error:
                status = int(error.code or 0)
    finally:
        os.chdir(before)
    return status, out.getvalue(), err.getvalue()


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "onnxtrain.cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)


def copied(folder: Path, name: str) -> str:
    """The artifacts in a folder of another name; nothing is trained there yet."""
    made = folder / name
    made.mkdir()
    for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        (made / file).write_bytes((folder / "run" / file).read_bytes())
    return name


def accuracy(model: Path, data: Path) -> float:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["image"]
    arrays = np.load(data)
    return float((session.run(["scores"], {"image": arrays["image"]})[0].argmax(1) == arrays["labels"]).mean())


def test_digits_are_learned_and_the_exported_model_is_as_good(tmp_path: Path) -> None:
    onnx.save(digits.network(), tmp_path / "model.onnx")
    digits.write(tmp_path)
    made = ["artifacts", "model.onnx", "--loss", "CrossEntropyLoss", "--optimizer", "AdamW", "--output", "scores"]
    status, text, _ = run(tmp_path, *made, "--out", "run")
    assert status == 0 and "trained: 4 initializers, 4,810 elements" in text and "optimizer_model.onnx" in text
    trained = ["train", "run", "--data", "train.npz", "--valid", "valid.npz", "--epochs", "20", "--lr", "3e-3"]
    trained += ["--schedule", "cosine", "--warmup", "20", "--accuracy", "scores", "--json"]
    status, text, error = run(tmp_path, *trained)
    assert (status, error) == (0, "")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 21 and lines[-1] == {"checkpoint": "run/trained_checkpoint", "steps": 900}
    assert lines[19]["accuracy"] >= 0.97
    assert lines[19]["valid_loss"] < lines[0]["valid_loss"]
    status, text, _ = run(tmp_path, "export", "run", "trained.onnx")
    assert status == 0 and "trained_checkpoint" in text
    assert accuracy(tmp_path / "trained.onnx", tmp_path / "valid.npz") == lines[19]["accuracy"]
    before = read(tmp_path / "run" / "checkpoint").tensors["first_weight"]
    np.testing.assert_array_equal(before, onnx.numpy_helper.to_array(digits.network().graph.initializer[0]))


KILLED = ["--data", "train.npz", "--valid-share", "0.1", "--epochs", "4", "--batch-size", "16"]
KILLED += ["--schedule", "linear", "--warmup", "5", "--save-every", "1", "--seed", "3", "--json"]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(folder: Path) -> None:
    whole, killed = copied(folder, "whole"), copied(folder, "killed")
    status, expected, _ = run(folder, "train", whole, *KILLED)
    assert status == 0
    found, kills = "", 0
    for wait in (3, 30, 1, 50):  # updates after which the process is killed
        process = start(folder, "train", killed, *KILLED, "--resume")
        trained = folder / killed / "trained_checkpoint"
        first = _updates(trained)
        while process.poll() is None and _updates(trained) < first + wait:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        found += process.communicate()[0]
        kills += process.returncode == -signal.SIGKILL
    assert kills == 4
    (folder / killed / ".trained_checkpoint.1.0.partial").write_bytes(b"left by a kill")
    status, rest, _ = run(folder, "train", killed, *KILLED, "--resume")
    assert not list((folder / killed).glob(".*"))
    assert status == 0
    _same(folder / whole / "trained_checkpoint", folder / killed / "trained_checkpoint")
    every = [_without_time(line) for line in expected.splitlines() if "epoch" in line]
    shown = [_without_time(line) for line in (found + rest).splitlines() if "epoch" in line]
    assert shown and all(line in every for line in shown)


def _updates(path: Path) -> int:
    return int(read(path).optimizer["step"]) if path.exists() else 0


def _without_time(line: str) -> dict:
    return {k: v for k, v in json.loads(line).items() if k != "seconds"}


def _same(one: Path, other: Path) -> None:
    first, second = read(one), read(other)
    for ours, theirs in ((first.tensors, second.tensors), (first.optimizer, second.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert (first.random, first.settings, first.properties) == (second.random, second.settings, second.properties)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_a_checkpoint_and_goes_on(folder: Path, number: signal.Signals) -> None:
    name = copied(folder, f"stopped{number}")
    command = ["train", name, "--data", "train.npz", "--epochs", "100000", "--valid", "valid.npz"]
    process = start(folder, *command)
    while not (folder / name / "trained_checkpoint").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 128 + number and "--resume goes on" in error and "Traceback" not in error
    left = read(folder / name / "trained_checkpoint")
    steps = 13 * int(left.properties["onnxtrain.train.epoch"]) + int(left.properties["onnxtrain.train.batch"])
    assert steps == left.optimizer["step"] > 0
    assert f"epoch {left.properties['onnxtrain.train.epoch'] + 1}" in error  # type: ignore[operator]


def test_a_run_is_repeated_and_resumed_with_its_own_settings_alone(folder: Path) -> None:
    one, other = copied(folder, "one"), copied(folder, "other")
    command = ["--data", "train.npz", "--epochs", "2", "--seed", "5"]
    for name in (one, other):
        assert run(folder, "train", name, *command)[0] == 0
    _same(folder / one / "trained_checkpoint", folder / other / "trained_checkpoint")
    assert run(folder, "train", one, *command)[0] == 0  # anew, from the same weights
    _same(folder / one / "trained_checkpoint", folder / other / "trained_checkpoint")
    status, text, _ = run(folder, "train", one, *command, "--resume")
    assert status == 0 and "all of 2 epochs are done" in text
    _same(folder / one / "trained_checkpoint", folder / other / "trained_checkpoint")
    status, text, error = run(folder, "train", one, *command, "--resume", "--batch-size", "8")
    assert status == 2 and "--batch-size was 32" in error and text == ""
    status, _, error = run(folder, "train", one, *command[2:], "--data", "valid.npz", "--resume")
    assert status == 2 and "the data are not those" in error


def test_words_are_data(folder: Path, tmp_path: Path) -> None:
    """Strings go to the model, and belong to the data that a run is resumed with."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 3]>
        words (string[batch] word) => (float[batch, 3] scores) {
            id = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [1, 2], default_int64 = 0> (word)
            scores = Gather (table, id)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((3, 3), np.float32), "table"))
    onnx.save(model, tmp_path / "words.onnx")
    words = np.array(["a", "b", "other"] * 20)
    np.savez(tmp_path / "words.npz", word=words, labels=np.tile([2, 0, 1], 20))
    np.savez(tmp_path / "others.npz", word=words[::-1], labels=np.tile([2, 0, 1], 20))
    made = ["artifacts", "words.onnx", "--loss", "cross_entropy", "--optimizer", "adam", "--output", "scores"]
    assert run(tmp_path, *made, "--out", "run")[0] == 0
    command = ["train", "run", "--epochs", "30", "--lr", "0.1", "--valid-share", "0.2", "--accuracy", "scores"]
    status, text, _ = run(tmp_path, *command, "--data", "words.npz")
    assert status == 0 and "epoch 30/30" in text and "accuracy 100.00%" in text.splitlines()[-2]
    status, _, error = run(tmp_path, *command, "--data", "others.npz", "--resume")
    assert status == 2 and "the data are not those" in error


def test_a_finished_run_takes_more_epochs_where_the_rate_is_constant(folder: Path) -> None:
    at_once, later = copied(folder, "at_once"), copied(folder, "later")
    assert run(folder, "train", at_once, "--data", "train.npz", "--epochs", "3")[0] == 0
    assert run(folder, "train", later, "--data", "train.npz", "--epochs", "1")[0] == 0
    assert run(folder, "train", later, "--data", "train.npz", "--epochs", "3", "--resume")[0] == 0
    _same(folder / at_once / "trained_checkpoint", folder / later / "trained_checkpoint")


def test_progress_is_a_line_for_each_epoch_where_nobody_watches(folder: Path) -> None:
    name = copied(folder, "plain")
    status, text, error = run(folder, "train", name, "--data", "train.npz", "--epochs", "2", "--valid-share", "0.25")
    assert (status, error) == (0, "")
    lines = text.splitlines()
    assert lines[0] == "300 rows, 100 held out; batch size 32, steps per epoch 10"
    assert [line.split()[1] for line in lines[1:3]] == ["1/2", "2/2"] and "held-out loss" in lines[1]
    assert len(lines) == 4 and "step 20" in lines[3]


def test_a_terminal_shows_a_bar(folder: Path) -> None:
    pytest.importorskip("rich")
    pty = pytest.importorskip("pty")
    name = copied(folder, "terminal")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "onnxtrain.cli", "train", name, "--data", "train.npz", "--epochs", "1"]
    environment = {**ENVIRONMENT, "TERM": "xterm"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=slave, check=True)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "epoch 1" in shown and "\x1b" in shown
    assert b"epoch 1/1" in done.stdout and b"\x1b" not in done.stdout


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"image": (4, 64)}, "has no array labels"),
        ({"image": (4, 64), "label": (4,)}, "close names: label"),
        ({"image": (4, 64), "labels": (4,), "weights": (4,)}, "the array weights, which is no input"),
        ({"image": (4, 64), "labels": (5,)}, "image 4, labels 5"),
        ({"image": (0, 64), "labels": (0,)}, "has no rows"),
        ({"image": (4, 64), "labels": ()}, "labels is a scalar"),
        ({"image": (4, 63), "labels": (4,)}, "image has the shape"),
    ],
)
def test_data_that_do_not_fit_are_named(folder: Path, arrays: dict, message: str) -> None:
    kinds = {"image": np.float32}
    np.savez(folder / "odd.npz", **{n: np.zeros(shape, kinds.get(n, np.int64)) for n, shape in arrays.items()})
    status, text, error = run(folder, "train", "run", "--data", "odd.npz", "--epochs", "1")
    assert status == 2 and message in error and "cure:" in error and "loss" not in text


def test_files_that_are_no_data_are_named(folder: Path) -> None:
    (folder / "text.npz").write_text("no data")
    np.save(folder / "one.npy", np.zeros(3))
    np.savez(folder / "objects.npz", image=np.array([None]), labels=np.zeros(1, np.int64))
    (folder / "cut.npz").write_bytes((folder / "train.npz").read_bytes()[:5000])
    for name in ("text.npz", "one.npy", "objects.npz", "cut.npz", "nowhere.npz"):
        status, _, error = run(folder, "train", "run", "--data", name, "--epochs", "1")
        assert status == 2 and f"{name} cannot be read" in error, name


@pytest.mark.parametrize(
    "options, message",
    [
        (["--epochs", "0"], "--epochs is 0"),
        (["--epochs", "1", "--batch-size", "0"], "--batch-size is 0"),
        (["--epochs", "1", "--save-every", "0"], "--save-every is 0"),
        (["--epochs", "1", "--seed", "-1"], "--seed is -1"),
        (["--epochs", "1", "--valid-share", "1.5"], "choose another --valid-share"),
        (["--epochs", "1", "--accuracy", "scores"], "no data to be measured on"),
        (["--epochs", "1", "--valid-share", "0.1", "--accuracy", "score"], "close names: scores"),
        (["--epochs", "1", "--valid-share", "0.1", "--accuracy", "scores", "--labels", "label"], "close names: labels"),
        (["--epochs", "1", "--valid-share", "0.1", "--accuracy", "loss"], "no axis of classes"),
        (["--epochs", "1", "--schedule", "linear", "--warmup", "99"], "does not fit"),
        (["--epochs", "1", "--device", "TPUExecutionProvider"], "no TPUExecutionProvider here"),
        (["--epochs", "3", "--lr", "1e38"], "the loss is"),
        (["--epochs", "1", "--prefix", "other_"], "other_training_model.onnx cannot be read"),
        (["--epochs", "1", "--schedule", "stairs"], "invalid choice"),
    ],
)
def test_options_that_cannot_be_used_are_named(folder: Path, options: list[str], message: str) -> None:
    status, _, error = run(folder, "train", "run", "--data", "train.npz", *options)
    assert status == 2 and message in error and "Traceback" not in error


def test_labels_out_of_range_are_an_error(folder: Path) -> None:
    arrays = dict(np.load(folder / "train.npz"))
    arrays["labels"][7] = 10
    np.savez(folder / "beyond.npz", **arrays)
    status, _, error = run(folder, "train", "run", "--data", "beyond.npz", "--epochs", "1")
    assert status == 2 and "label outside of the classes" in error


def test_a_model_of_one_batch_size_takes_whole_batches(folder: Path, tmp_path: Path) -> None:
    model = digits.network()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 48
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 48
    onnx.save(model, tmp_path / "fixed.onnx")
    made = ["artifacts", str(tmp_path / "fixed.onnx"), "--loss", "cross_entropy", "--optimizer", "sgd"]
    assert run(tmp_path, *made, "--momentum", "0.9", "--out", "fixed")[0] == 0
    data = str(folder / "train.npz")
    status, text, _ = run(tmp_path, "train", "fixed", "--data", data, "--epochs", "1", "--valid-share", "0.2")
    assert status == 0 and "320 rows, 80 held out; batch size 48, steps per epoch 6" in text and "step 6" in text
    status, _, error = run(tmp_path, "train", "fixed", "--data", data, "--epochs", "1", "--batch-size", "32")
    assert status == 2 and "takes 48 rows at a time" in error


def test_every_kind_has_a_name_in_words() -> None:
    from onnxtrain.cli.artifacts import _block

    words = {"MSELoss": "mse", "BCEWithLogitsLoss": "bce_with_logits", "SmoothL1Loss": "smooth-l1", "CTCLoss": "ctc"}
    for name, word in words.items():
        assert _block("--loss", word, LossType, onnxblock.loss, {}) is LossType[name]
    for kind in OptimType:
        assert _block("--optimizer", kind.name.lower(), OptimType, onnxblock.optim, {}) is kind


@pytest.mark.parametrize(
    "options, message",
    [
        (["--loss", "cross_entropi"], "choose MSELoss, CrossEntropyLoss"),
        (["--loss", "mse", "--label-smoothing", "0.1"], "MSELoss has no --label-smoothing"),
        (["--weight-decay", "0.1", "--loss", "mse"], "--weight-decay is given without --optimizer"),
        (["--loss", "mse", "--optimizer", "adafactor", "--eps", "1e-3"], "Adafactor has no --eps"),
        (["--loss", "mse", "--optimizer", "sgd", "--nesterov"], "needs a momentum"),
        (["--loss", "mse", "--train", "nothing*"], "no initializer is called like nothing*"),
        (["--loss", "mse", "--freeze", "*"], "nothing would be trained"),
        (["--loss", "mse", "--loss-input", "score"], "close names: scores"),
        (["--loss", "mse", "--output", "score"], "close names: scores"),
        (["--loss", "mse", "--memory-budget", "0.5"], 'worst_case={"image": (batch, 64)'),
        (["--loss", "mse", "--memory-budget", "9 B", "--worst-case", "image=8,64"], "needs at least"),
        (["--loss", "mse", "--memory-budget", "much"], "is no number of bytes"),
        (["--loss", "mse", "--memory-budget", "min", "--worst-case", "8,64"], "argument --worst-case"),
    ],
)
def test_artifacts_that_cannot_be_made_are_errors(folder: Path, options: list[str], message: str) -> None:
    status, _, error = run(folder, "artifacts", "model.onnx", *options, "--out", "nowhere")
    assert status == 2 and message in error and not (folder / "nowhere").exists()


def test_a_memory_budget_reaches_the_training_model(folder: Path) -> None:
    command = ["artifacts", "model.onnx", "--loss", "cross_entropy", "--out", "small"]
    status, _, error = run(folder, *command, "--memory-budget", "min", "--worst-case", "image=512,64")
    assert status == 0, error
    small, plain = (onnx.load(folder / n / "training_model.onnx").graph.node for n in ("small", "run"))
    assert len(small) > len(plain), "the backward pass is held back"


def test_options_reach_the_loss_and_the_optimizer(folder: Path) -> None:
    command = ["artifacts", "model.onnx", "--out", "full", "--prefix", "p_", "--nominal", "--ort"]
    command += ["--loss", "cross_entropy", "--label-smoothing", "0.1", "--ignore-index", "9", "--loss-input", "scores"]
    command += ["--optimizer", "adamw", "--betas", "0.8", "0.9", "--eps", "1e-7", "--weight-decay", "0.01"]
    command += ["--no-decay", "*bias", "--clip-norm", "2", "--formula", "torch", "--freeze", "first*"]
    status, text, _ = run(folder, *command)
    assert status == 0 and "trained: 2 initializers, 650 elements" in text and "frozen: 2 initializers" in text
    names = ["checkpoint", "nominal_checkpoint"]
    names += [f"{kind}_model.{end}" for kind in ("training", "eval", "optimizer") for end in ("onnx", "ort")]
    assert sorted(p.name for p in (folder / "full").iterdir()) == sorted(f"p_{name}" for name in names)
    assert run(folder, "train", "full", "--prefix", "p_", "--data", "train.npz", "--epochs", "1")[0] == 0
    left = read(folder / "full" / "p_trained_checkpoint")
    for setting in ('"betas": [0.8, 0.9]', '"eps": 1e-07', '"formula": "torch"', '"no_decay": ["*bias"]'):
        assert setting in left.settings["optimizer"]
    before = read(folder / "full" / "p_checkpoint")
    np.testing.assert_array_equal(left.tensors["first_weight"], before.tensors["first_weight"])
    assert (left.tensors["second_weight"] != before.tensors["second_weight"]).any()


def test_sequences_are_learned_by_ctc(tmp_path: Path) -> None:
    """Targets and lengths are arrays of the data; an alignment that is not possible counts as 0 where asked."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        speech (float[batch, time, 8] sound) => (float[time, batch, 5] log_probs) {
            scores = MatMul (sound, weight)
            first = Transpose <perm = [1, 0, 2]> (scores)
            log_probs = LogSoftmax (first)
        }"""
    )
    random = np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((8, 5), np.float32), "weight"))
    onnx.save(model, tmp_path / "speech.onnx")
    lengths = np.full(32, 6)
    lengths[0] = 1  # too short for its labels
    arrays = {"sound": random.standard_normal((32, 6, 8), np.float32), "targets": random.integers(1, 5, (32, 2))}
    np.savez(tmp_path / "speech.npz", **arrays, input_lengths=lengths, target_lengths=np.full(32, 2))
    for option, expected in (["--zero-infinity"], 0), ([], 2):
        made = ["artifacts", "speech.onnx", "--loss", "ctc", *option, "--optimizer", "adam", "--out", "run"]
        assert run(tmp_path, *made)[0] == 0
        status, text, error = run(tmp_path, "train", "run", "--data", "speech.npz", "--epochs", "20", "--json")
        assert status == expected and ("the loss is inf" in error) == (expected == 2)
        losses = [json.loads(line).get("loss") for line in text.splitlines()]
        assert not losses or losses[0] > losses[19] > 0


def test_export_names_outputs_and_checkpoints(folder: Path) -> None:
    assert run(folder, "export", "run", "hidden.onnx", "--output", "hidden", "--checkpoint", "run/checkpoint")[0] == 0
    session = ort.InferenceSession(folder / "hidden.onnx", providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == ["hidden"]
    image, weights = np.load(folder / "valid.npz")["image"], read(folder / "run" / "checkpoint").tensors
    expected = image @ weights["first_weight"].T + weights["first_bias"]
    np.testing.assert_allclose(session.run(None, {"image": image})[0], expected, rtol=1e-5, atol=1e-5)
    status, _, error = run(folder, "export", "run", "x.onnx", "--output", "hiden")
    assert status == 2 and "close names: hidden" in error and not (folder / "x.onnx").exists()
    status, _, error = run(folder, "export", "run", "model.onnx/x.onnx")
    assert status == 2 and "Traceback" not in error


def test_properties_of_the_user_stay(folder: Path) -> None:
    name = copied(folder, "properties")
    path = folder / name / "checkpoint"
    state = CheckpointState.load_checkpoint(path)
    state.properties["origin"] = "a test"
    CheckpointState.save_checkpoint(state, path)
    assert run(folder, "train", name, "--data", "train.npz", "--epochs", "1")[0] == 0
    assert read(folder / name / "trained_checkpoint").properties["origin"] == "a test"


@pytest.mark.parametrize("command", ["artifacts", "train", "export"])
def test_help_has_examples(tmp_path: Path, command: str) -> None:
    status, text, _ = run(tmp_path, command, "--help")
    assert status == 0 and f"onnxtrain {command} " in text.split("examples:")[1]


def test_commands_need_no_rich() -> None:
    program = "import sys; sys.modules['rich'] = None; from onnxtrain import cli; cli.main(['train', '--help'])"
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
