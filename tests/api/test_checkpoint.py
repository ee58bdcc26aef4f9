"""Checkpoint files: killed while they are written, damaged, nominal; what a state gives and keeps."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import digits
import numpy as np
import pytest

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts, seal
from onnxtrain.errors import ArtifactError, CheckpointError, OnnxTrainError

ROWS = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
LABELS = np.arange(8)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of the digits' network, the first layer frozen; the checkpoint has an optimizer's state."""
    folder = tmp_path_factory.mktemp("artifacts")
    made = generate_artifacts(
        digits.network(),
        requires_grad=["second*"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
        nominal_checkpoint=True,
    )
    state = CheckpointState.load_checkpoint(made["checkpoint"])
    module = Module(made["training_model"], state)
    optimizer = Optimizer(made["optimizer_model"], module)
    module(ROWS, LABELS)
    optimizer.step()
    CheckpointState.save_checkpoint(state, folder / "trained", include_optimizer_state=True)
    return made | {"trained": folder / "trained"}


def _save_forever(state: CheckpointState, path: Path, version: int) -> None:
    """What a child does until it is killed: save versions whose every number is that of the version."""
    while True:
        version += 1
        for parameter in state.parameters.values():
            parameter.data = np.full(parameter.form.shape, version, np.float32)
        state.properties["version"] = version
        CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_a_kill_at_any_moment_leaves_a_whole_file(paths: dict[str, Path], tmp_path: Path) -> None:
    path, draw = tmp_path / "checkpoint", random.Random(0)
    state = CheckpointState.load_checkpoint(paths["trained"])
    versions, left, longest = [0], 0, 0.0
    for parameter in state.parameters.values():
        parameter.data = np.zeros(parameter.form.shape, np.float32)
    state.properties["version"] = 0
    for _ in range(3):
        started = time.perf_counter()
        CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
        longest = max(longest, 4 * (time.perf_counter() - started))
    for _ in range(200):
        child = os.fork()
        if child == 0:
            _save_forever(state, path, versions[-1])
        time.sleep(draw.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        partials = list(tmp_path.glob(".checkpoint.*.partial"))
        left += len(partials)
        assert len(partials) < 2, "the child did not remove what the one before left"
        loaded = CheckpointState.load_checkpoint(path)
        version = int(loaded.properties["version"])
        assert version >= versions[-1]
        assert all((p.data == version).all() for p in loaded.parameters.values())
        versions.append(version)
    assert versions[-1] > 0
    assert left, "no kill was in the middle of a file"
    CheckpointState.save_checkpoint(state, path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    assert CheckpointState.load_checkpoint(path).properties["version"] == 0


def _damaged(content: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """The content with one fault of each kind, at places drawn by chance."""
    place = draw.randrange(len(content))
    yield "bit", content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    yield "cut", content[:place]
    yield "insertion", content[:place] + bytes([draw.randrange(256)]) + content[place:]
    yield "deletion", content[:place] + content[place + draw.randint(1, 16) :]
    other = draw.randrange(len(content))
    while content[other] == content[place]:
        other = draw.randrange(len(content))
    first, second = sorted((place, other))
    one, two = content[first : first + 1], content[second : second + 1]
    yield "swap", content[:first] + two + content[first + 1 : second] + one + content[second + 1 :]


@pytest.mark.parametrize("kind", ["trained", "training_model", "eval_model", "optimizer_model"])
def test_damage_is_an_error(paths: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """25 faults of each of five kinds in each file: 500 files in all."""
    whole, draw = paths[kind].read_bytes(), random.Random(1)
    state = CheckpointState.load_checkpoint(paths["trained"])
    module = Module(paths["training_model"], state)
    use = {
        "trained": CheckpointState.load_checkpoint,
        "training_model": lambda path: Module(path, state),
        "eval_model": lambda path: Module(paths["training_model"], state, path),
        "optimizer_model": lambda path: Optimizer(path, module),
    }[kind]
    file = tmp_path / "file"
    file.write_bytes(whole)
    use(file)
    for _ in range(25):
        for fault, content in _damaged(whole, draw):
            file.write_bytes(content)
            with pytest.raises(OnnxTrainError, match=r"damaged|no checkpoint of onnxtrain") as found:
                use(file)
            assert str(file) in str(found.value) and "cure" in str(found.value), fault


def test_every_bit_of_a_header_counts(paths: dict[str, Path]) -> None:
    content = paths["checkpoint"].read_bytes()
    for place in range(8 + int.from_bytes(content[:8], "little")):
        for bit in range(8):
            with pytest.raises(CheckpointError):
                CheckpointState.load_checkpoint(
                    content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
                )


def test_a_model_that_was_changed_on_purpose_is_sealed_again(paths: dict[str, Path], tmp_path: Path) -> None:
    import onnx

    model = onnx.load(paths["training_model"])
    model.doc_string = "changed"
    onnx.save(model, tmp_path / "changed.onnx")
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    with pytest.raises(ArtifactError, match=r"damaged.*\n.*seal"):
        Module(tmp_path / "changed.onnx", state)
    seal(tmp_path / "changed.onnx")
    assert float(Module(tmp_path / "changed.onnx", state)(ROWS, LABELS)) > 0


def test_files_of_another_kind_are_told(paths: dict[str, Path], tmp_path: Path) -> None:
    import onnx

    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    with pytest.raises(ArtifactError, match="is the evaluation model"):
        Module(paths["eval_model"], state)
    with pytest.raises(ArtifactError, match="is the training model"):
        Module(paths["training_model"], state, paths["training_model"])
    onnx.save(digits.network(), tmp_path / "plain.onnx")
    with pytest.raises(ArtifactError, match="no model of generate_artifacts"):
        Module(tmp_path / "plain.onnx", state)
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointState.load_checkpoint(tmp_path / "nowhere")
    for content in (b"", b"no checkpoint", paths["training_model"].read_bytes()):
        with pytest.raises(CheckpointError):
            CheckpointState.load_checkpoint(content)
    from safetensors.numpy import save

    with pytest.raises(CheckpointError, match="no checkpoint of onnxtrain"):
        CheckpointState.load_checkpoint(save({"first_weight": ROWS}))


def test_a_checkpoint_is_safetensors_under_the_names_of_the_model(paths: dict[str, Path]) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(paths["trained"])
    names = {"first_weight", "first_bias", "second_weight", "second_bias", "optimizer/step"}
    states = {f"optimizer/second_{p}.{s}" for p in ("weight", "bias") for s in ("exp_avg", "exp_avg_sq")}
    assert set(tensors) == names | states
    state = CheckpointState.load_checkpoint(paths["trained"])
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, tensors[name])


def test_parameters_are_found_iterated_and_shown(paths: dict[str, Path]) -> None:
    parameters = CheckpointState.load_checkpoint(paths["checkpoint"]).parameters
    assert "second_weight" in parameters and "second_wait" not in parameters and 3 not in parameters
    assert len(parameters) == 4 and {n for n, _ in parameters} == set(parameters.keys()) == set(
        dict(parameters.items())
    )
    assert [p.name for p in parameters.values() if p.requires_grad] == ["second_weight", "second_bias"]
    assert "second_weight" in repr(parameters) and "second_weight" in repr(parameters["second_weight"])
    with pytest.raises(KeyError, match="close names: second_weight"):
        _ = parameters["second_wait"]


def test_a_parameter_is_set_in_place(paths: dict[str, Path]) -> None:
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    module = Module(paths["training_model"], state, paths["eval_model"])
    before = module.eval()(ROWS, LABELS)
    weight, bias = state.parameters["second_weight"], state.parameters["second_bias"]
    kept = weight.data
    weight.data = np.zeros_like(kept)
    bias.data = np.zeros(10, np.float32)
    np.testing.assert_allclose(module(ROWS, LABELS), np.log(10), rtol=1e-6)  # all classes are equal
    weight.data[:] = 7  # a copy
    assert not weight.data.any() and before != module(ROWS, LABELS)
    for wrong in (kept.astype(np.float64), kept.T, kept[0]):
        with pytest.raises(CheckpointError, match="second_weight is"):
            weight.data = wrong
    with pytest.raises(AttributeError):
        weight.requires_grad = False  # type: ignore[misc]
    state.parameters["second_weight"] = kept
    np.testing.assert_array_equal(weight.data, kept)
    with pytest.raises(KeyError, match="no parameter other"):
        state.parameters["other"] = kept


def test_gradients_are_read_and_lazily_reset(paths: dict[str, Path]) -> None:
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    weight = state.parameters["second_bias"]
    assert weight.grad is None
    module = Module(paths["training_model"], state)
    assert weight.grad is not None and not weight.grad.any() and state.parameters["first_bias"].grad is None
    module(ROWS, LABELS)
    first = weight.grad
    assert first is not None and np.abs(first).max() > 0
    np.testing.assert_allclose(first.sum(), 0, atol=1e-6)  # softmax - one-hot sums to 0
    assert state.parameters["first_bias"].grad is None
    module.lazy_reset_grad()
    np.testing.assert_array_equal(weight.grad, first)  # until the next step
    module(ROWS[:4], LABELS[:4])
    assert weight.grad is not None and (weight.grad != first).any()


def test_properties_come_back_as_what_they_were(paths: dict[str, Path], tmp_path: Path) -> None:
    state = CheckpointState.load_checkpoint(paths["checkpoint"])
    given = {"flag": True, "off": False, "count": 2**62, "share": 0.1, "tiny": 5e-324, "text": 'ü "x"\n', "whole": 1.0}
    for name, value in given.items():
        state.properties[name] = value
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    found = CheckpointState.load_checkpoint(tmp_path / "c").properties
    assert found.as_dict() == given and len(found) == 7 and "flag" in found and "none" not in found
    assert [type(v) for _, v in found] == [type(v) for v in given.values()]
    del found["flag"]
    assert "flag" not in found and "share" in repr(found)
    with pytest.raises(KeyError):
        _ = found["flag"]
    for wrong in (None, [1], np.zeros(1), b"x"):
        with pytest.raises(TypeError, match="int, float, str or bool"):
            found["wrong"] = wrong  # type: ignore[assignment]
    with pytest.raises(ValueError, match="JSON"):
        found["wrong"] = float("nan")


def test_a_nominal_checkpoint_waits_for_its_content(paths: dict[str, Path]) -> None:
    full = CheckpointState.load_checkpoint(paths["checkpoint"])
    source = Module(paths["training_model"], full, paths["eval_model"])
    nominal = CheckpointState.load_checkpoint(paths["nominal_checkpoint"])
    assert paths["nominal_checkpoint"].stat().st_size < 2000 and nominal.parameters.keys() == full.parameters.keys()
    module = Module(paths["training_model"], nominal, paths["eval_model"])
    optimizer = Optimizer(paths["optimizer_model"], module)
    assert module.get_parameters_size(False) == 4810 and module.get_parameters_size() == 650
    for use in (
        lambda: module(ROWS, LABELS),
        lambda: nominal.parameters["first_bias"].data,
        lambda: module.get_contiguous_parameters(),
        lambda: module.export_model_for_inferencing("nowhere.onnx"),
    ):
        with pytest.raises(CheckpointError, match=r"(?i)load|content"):
            use()
    assert not Path("nowhere.onnx").exists()
    module.copy_buffer_to_parameters(source.get_contiguous_parameters(), trainable_only=False)
    expected = [_step(source, Optimizer(paths["optimizer_model"], source)) for _ in range(3)]
    assert [_step(module, optimizer) for _ in range(3)] == expected


def _step(module: Module, optimizer: Optimizer) -> float:
    loss = float(module(ROWS, LABELS))
    optimizer.step()
    module.lazy_reset_grad()
    return loss


def test_checkpoints_of_other_models_are_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    def artifacts(name: str, hidden: int = 64, **options: object) -> dict[str, Path]:
        return generate_artifacts(
            digits.network(hidden),
            loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.SGD,
            artifact_directory=tmp_path / name,
            **options,  # type: ignore[arg-type]
        )

    wide, every = artifacts("wide", 32, requires_grad=["second*"]), artifacts("every")
    for other, message in ((wide, "is .* in the state"), (every, "differ in whether")):
        with pytest.raises(CheckpointError, match=message):
            Module(paths["training_model"], CheckpointState.load_checkpoint(other["checkpoint"], of_any_set=True))
    module = Module(paths["training_model"], CheckpointState.load_checkpoint(paths["trained"]))
    with pytest.raises(ArtifactError, match="of the set"):
        Optimizer(every["optimizer_model"], module)
    sgd = artifacts("sgd", requires_grad=["second*"])
    module = Module(sgd["training_model"], CheckpointState.load_checkpoint(paths["trained"], of_any_set=True))
    with pytest.raises(CheckpointError, match="the state is that of AdamW"):
        Optimizer(sgd["optimizer_model"], module)
