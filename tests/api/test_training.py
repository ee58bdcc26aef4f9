"""Module and Optimizer: what calls take and give, accumulation, faults of the predecessor, exported models."""

from __future__ import annotations

import warnings
from pathlib import Path

import digits
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper, parser
from torch import nn

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, ConstantLRScheduler, LinearLRScheduler, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ArtifactError, BackendError, DataError

LABELS = np.arange(8) % 10


def rows(seed: int = 0, count: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 64), np.float32)


def without_dropout() -> onnx.ModelProto:
    """The digits' network whose dropout is off."""
    model = digits.network()
    for node in model.graph.node:
        if node.op_type == "Dropout":
            del node.input[2:]
    return model


def artifacts(folder: Path, model: onnx.ModelProto, **options) -> dict[str, Path]:
    given = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW, "artifact_directory": folder}
    return generate_artifacts(model, **given | options)


def loaded(paths: dict[str, Path], checkpoint: str = "checkpoint", **options) -> tuple[Module, Optimizer]:
    state = CheckpointState.load_checkpoint(paths[checkpoint])
    module = Module(paths["training_model"], state, paths["eval_model"], **options)
    return module, Optimizer(paths["optimizer_model"], module)


def step(module: Module, optimizer: Optimizer, *batch) -> float:
    loss = module(*batch)
    optimizer.step()
    module.lazy_reset_grad()
    return float(loss[0] if isinstance(loss, tuple) else loss)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return artifacts(tmp_path_factory.mktemp("dropout"), digits.network(), additional_output_names=["scores"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return artifacts(tmp_path_factory.mktemp("plain"), without_dropout())


def test_names_and_outputs(paths: dict[str, Path], plain: dict[str, Path]) -> None:
    module, _ = loaded(paths)
    assert module.input_names() == ["image", "labels"] and module.output_names() == ["loss", "scores"]
    loss, scores = module(rows(), LABELS)
    assert loss.shape == () and scores.shape == (8, 10)
    assert module.eval().output_names() == ["loss", "scores"] and module.input_names() == ["image", "labels"]
    assert loaded(plain)[0](rows(), LABELS).shape == ()


def test_evaluation_drops_nothing_and_keeps_gradients(paths: dict[str, Path]) -> None:
    module, _ = loaded(paths)
    first, second = module(rows(), LABELS)[0], module(rows(), LABELS)[0]
    assert first != second  # dropout draws anew
    before = module.state.parameters["first_bias"].grad
    module.eval()
    assert not module.training and module(rows(), LABELS)[0] == module(rows(), LABELS)[0]
    np.testing.assert_array_equal(module.state.parameters["first_bias"].grad, before)
    assert module.train().training and not module.train(False).training


def test_two_halves_are_a_whole_batch(plain: dict[str, Path]) -> None:
    """Gradients add up until they are reset; those of the mean over each half are twice those of the whole."""
    whole, _ = loaded(plain)
    halves, _ = loaded(plain)
    expected = float(whole(rows(), LABELS))
    found = [float(halves(rows()[part], LABELS[part])) for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(np.mean(found), expected, rtol=1e-6)
    for name, parameter in whole.state.parameters:
        both = halves.state.parameters[name].grad
        assert both is not None
        np.testing.assert_allclose(both / 2, parameter.grad, rtol=1e-4, atol=1e-7)
    halves.lazy_reset_grad()
    halves(rows(), LABELS)
    for name, parameter in whole.state.parameters:
        np.testing.assert_array_equal(halves.state.parameters[name].grad, parameter.grad)


def test_ortvalues_give_ortvalues(paths: dict[str, Path]) -> None:
    module, _ = loaded(paths)
    module.eval()
    expected = module(rows(), LABELS)
    given = [ort.OrtValue.ortvalue_from_numpy(v) for v in (rows(), LABELS)]
    for batch in (given, [given[0], LABELS]):
        found = module(*batch)
        assert all(isinstance(v, ort.OrtValue) for v in found)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
    assert all(isinstance(v, np.ndarray) for v in module(rows(), LABELS))


def test_slices_and_other_layouts_are_taken(plain: dict[str, Path]) -> None:
    module, _ = loaded(plain)
    every, labels = rows(count=4096), np.arange(4096) % 10
    expected = module(every[::2].copy(), labels[::2].copy())
    for _ in range(20):  # copies are made for the call, and memory is used again
        np.testing.assert_array_equal(module(every[::2], labels[::2]), expected)
        np.testing.assert_array_equal(module(np.asfortranarray(every[::2]), labels[::2]), expected)


@pytest.mark.parametrize(
    "batch, message",
    [
        ((rows(),), "1 inputs were given, not 2"),
        ((rows(), LABELS, LABELS), "3 inputs were given"),
        ((rows().astype(np.float64), LABELS), "image is float64, not float32"),
        ((rows(), LABELS.astype(np.int32)), "labels is int32, not int64"),
        ((rows()[:, :63], LABELS), "image has the shape"),
        ((rows()[0], LABELS), "image has the shape"),
        ((rows()[:0], LABELS[:0]), "nothing to learn from"),
        ((rows().tolist(), LABELS), "image is list"),
        ((rows(), LABELS + 3), "label outside of the classes"),
        ((rows(), LABELS - 1), "label outside of the classes"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_batches_that_do_not_fit_are_errors(paths: dict[str, Path], batch: tuple, message: str, training: bool) -> None:
    module, optimizer = loaded(paths)
    module.train(training)
    with pytest.raises(DataError, match=message):
        module(*batch)
    assert np.isfinite(step(module.train(), optimizer, rows(), LABELS))


@pytest.mark.parametrize("names", [("batch", "batch"), ("input-0 dim", "output-0_dim0"), (None, None), ("batch", 1)])
@pytest.mark.parametrize("loss", [LossType.CrossEntropyLoss, LossType.MSELoss])
def test_batch_sizes_that_contradict_each_other_are_an_error(
    tmp_path: Path, names: tuple[str | int | None, ...], loss: LossType
) -> None:
    """Whatever a file calls its sizes: what inference knows of them counts."""
    model = without_dropout()
    for value, name in zip((*model.graph.input, *model.graph.output), names, strict=True):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        if name is not None:
            setattr(dim, "dim_value" if isinstance(name, int) else "dim_param", name)
    module, _ = loaded(artifacts(tmp_path, model, loss=loss))
    targets = LABELS if loss is LossType.CrossEntropyLoss else rows()[:, :10]
    for count in (1, 4):
        with pytest.raises(DataError, match=f"has the size {count} on axis 0, image has 8 on axis 0; both are"):
            module(rows(), targets[:count])
    assert np.isfinite(module(rows(), targets)) and np.isfinite(module(rows()[:1], targets[:1]))


def test_targets_of_a_size_that_only_running_tells_are_not_broadcast(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    positive (float[n, 3] x) => (float[m, 3] y)
    <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
    {
        zero = Constant <value_float = 0.0> ()
        last = Constant <value_ints = [-1]> ()
        sums = ReduceSum <keepdims = 0> (x, last)
        kept = Greater (sums, zero)
        some = Compress <axis = 0> (x, kept)
        y = MatMul (some, w)
    }
    """
    module, _ = loaded(artifacts(tmp_path, parser.parse_model(text), loss=LossType.MSELoss))
    x = np.array([[1, 1, 1], [-1, -1, -1], [2, 0, 0]], np.float32)
    assert np.isfinite(module(x, np.zeros((2, 3), np.float32)))
    with pytest.raises(BackendError, match=r"Reshape|reshape"):
        module(x, np.zeros((1, 3), np.float32))


def test_a_refused_batch_leaves_no_trace(paths: dict[str, Path]) -> None:
    (one, first), (other, second) = loaded(paths), loaded(paths)
    losses = [step(one, first, rows(i), LABELS) for i in range(4)]
    found = [step(other, second, rows(i), LABELS) for i in range(2)]
    with pytest.raises(DataError):
        other(rows(), LABELS + 5)
    found += [step(other, second, rows(i), LABELS) for i in range(2, 4)]
    assert found == losses


def test_evaluation_without_an_evaluation_model_is_an_error(paths: dict[str, Path]) -> None:
    module = Module(paths["training_model"], CheckpointState.load_checkpoint(paths["checkpoint"]))
    for use in (module.eval, lambda: module.export_model_for_inferencing("nowhere.onnx"), lambda: module.train(False)):
        with pytest.raises(ArtifactError, match="no evaluation model"):
            use()
    assert module.training


def test_an_update_without_gradients_is_an_error(paths: dict[str, Path]) -> None:
    with pytest.raises(ArtifactError, match="there are no gradients"):
        loaded(paths)[1].step()


def test_to_train_nothing_is_an_error(tmp_path: Path) -> None:
    for options in (
        {"requires_grad": []},
        {"frozen_params": ["*"]},
        {"requires_grad": ["first*"], "frozen_params": ["first*"]},
    ):
        with pytest.raises(ArtifactError, match=r"nothing would be trained|is in requires_grad and in frozen_params"):
            artifacts(tmp_path / "nothing", digits.network(), **options)
    assert not (tmp_path / "nothing").exists()


def test_rate_and_schedule_come_back_with_the_optimizer(paths: dict[str, Path], tmp_path: Path) -> None:
    """A run that is saved and loaded in the middle is, to the bit, the run that is not."""

    def run(module: Module, optimizer: Optimizer, schedule: LinearLRScheduler, steps: range) -> list[float]:
        losses = []
        for index in steps:
            losses.append(step(module, optimizer, rows(index), LABELS))
            schedule.step()
        return losses

    module, optimizer = loaded(paths)
    schedule = LinearLRScheduler(optimizer, 4, 20, 1e-2)
    expected = run(module, optimizer, schedule, range(10))
    first, its = loaded(paths)
    found = run(first, its, LinearLRScheduler(its, 4, 20, 1e-2), range(5))
    CheckpointState.save_checkpoint(first.state, tmp_path / "half", include_optimizer_state=True)
    second, its = loaded(paths | {"half": tmp_path / "half"}, "half")
    assert its.get_learning_rate() == pytest.approx(1e-2 * 15 / 16) and its.updates == 5
    found += run(second, its, LinearLRScheduler(its, 4, 20, 1e-2), range(5, 10))
    assert found == expected
    for name, parameter in module.state.parameters:
        np.testing.assert_array_equal(second.state.parameters[name].data, parameter.data)
    with pytest.warns(UserWarning, match="another schedule"):
        ConstantLRScheduler(its, 1e-2)
    assert its.get_learning_rate() == pytest.approx(1e-2)


def test_without_the_optimizers_state_it_begins_anew(paths: dict[str, Path], tmp_path: Path) -> None:
    module, optimizer = loaded(paths)
    assert optimizer.get_learning_rate() == pytest.approx(1e-3)
    optimizer.set_learning_rate(0.5)
    step(module, optimizer, rows(), LABELS)
    CheckpointState.save_checkpoint(module.state, tmp_path / "weights")
    again, fresh = loaded(paths | {"weights": tmp_path / "weights"}, "weights")
    assert fresh.get_learning_rate() == pytest.approx(1e-3) and fresh.updates == 0
    np.testing.assert_array_equal(again.state.parameters["first_bias"].data, module.state.parameters["first_bias"].data)


def test_a_seed_decides_dropout(paths: dict[str, Path]) -> None:
    def losses(seed: int | None) -> list[float]:
        module, optimizer = loaded(paths, seed=seed)
        return [step(module, optimizer, rows(), LABELS) for _ in range(3)]

    assert losses(1) == losses(1) != losses(2)
    assert losses(None) == losses(None)


def test_vectors_of_all_parameters(plain: dict[str, Path]) -> None:
    module, optimizer = loaded(plain)
    module.eval()
    before = module.get_contiguous_parameters()
    assert before.shape() == [4810] == [module.get_parameters_size(False)]
    arrays = [p.data.reshape(-1) for p in module.state.parameters.values()]
    np.testing.assert_array_equal(before.numpy(), np.concatenate(arrays))
    kept = before.numpy().copy()
    step(module.train(), optimizer, rows(), LABELS)
    assert (module.get_contiguous_parameters().numpy() != kept).any()
    module.copy_buffer_to_parameters(kept)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), kept)
    for wrong in (kept[:-1], kept.astype(np.float64)):
        with pytest.raises(DataError, match="the buffer has"):
            module.copy_buffer_to_parameters(wrong)


def test_vectors_of_trained_parameters(tmp_path: Path) -> None:
    module, _ = loaded(artifacts(tmp_path, digits.network(), frozen_params=["first*"]))
    assert module.get_parameters_size() == 650 and module.get_parameters_size(trainable_only=False) == 4810
    frozen = module.state.parameters["first_weight"].data
    module.copy_buffer_to_parameters(ort.OrtValue.ortvalue_from_numpy(np.arange(650, dtype=np.float32)))
    assert module.get_contiguous_parameters(trainable_only=True).numpy().tolist() == list(range(650))
    np.testing.assert_array_equal(module.state.parameters["first_weight"].data, frozen)


def test_options_of_sessions_are_used(plain: dict[str, Path], tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    state = CheckpointState.load_checkpoint(plain["checkpoint"])
    module = Module(plain["training_model"], state, session_options=options)
    np.testing.assert_allclose(module(rows(), LABELS), loaded(plain)[0](rows(), LABELS), rtol=1e-6)
    assert (tmp_path / "optimized.onnx").exists()


def test_devices_that_are_not_there_are_errors(plain: dict[str, Path]) -> None:
    state = CheckpointState.load_checkpoint(plain["checkpoint"])
    with pytest.raises(BackendError, match="no TPUExecutionProvider here"):
        Module(plain["training_model"], state, device="TPUExecutionProvider")


def test_exported_models_have_the_trained_parameters(paths: dict[str, Path], tmp_path: Path) -> None:
    module, optimizer = loaded(paths)
    for index in range(3):
        step(module, optimizer, rows(index), LABELS)
    module.export_model_for_inferencing(tmp_path / "model.onnx")
    module.export_model_for_inferencing(tmp_path / "more.onnx", ["active", "scores", "hidden"])
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["image"] and [o.name for o in model.graph.output] == ["scores"]
    assert {i.name for i in model.graph.initializer} >= {"first_weight", "second_bias"}
    _, expected = module.eval()(rows(), LABELS)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"image": rows()})[0], expected)
    more = ort.InferenceSession(tmp_path / "more.onnx", providers=["CPUExecutionProvider"])
    active, scores, hidden = more.run(None, {"image": rows()})
    np.testing.assert_array_equal(scores, expected)
    np.testing.assert_array_equal(active, np.maximum(hidden, 0))
    with pytest.raises(ArtifactError, match="close names: scores"):
        module.export_model_for_inferencing(tmp_path / "none.onnx", ["score"])


WORDS = """
<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 3]>
words (string[batch, length] words) => (float[batch, 4] scores)
{
    ids = ai.onnx.ml.LabelEncoder
        <keys_strings = ["red", "green", "blue"], values_int64s = [1, 2, 3], default_int64 = 0> (words)
    vectors = Gather (table, ids)
    mean = ReduceMean <keepdims = 0> (vectors, axis)
    scores = Gemm <transB = 1> (mean, weight, bias)
}
"""


def words() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    model = parser.parse_model(WORDS)
    for name, shape in {"table": (4, 6), "weight": (4, 6), "bias": (4,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    return model


def test_strings_are_learned_from(tmp_path: Path) -> None:
    module, optimizer = loaded(artifacts(tmp_path, words(), optimizer=OptimType.Adam))
    optimizer.set_learning_rate(0.1)
    batch = np.array([["red", "red"], ["green", "green"], ["blue", "blue"], ["other", "?"]])
    labels = np.array([2, 0, 3, 1])
    losses = [step(module, optimizer, batch, labels) for _ in range(40)]
    assert losses[-1] < 0.05 < losses[0]
    assert float(module.eval()(batch.astype(object), labels)) < 0.05
    module.export_model_for_inferencing(tmp_path / "trained.onnx")
    session = ort.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, {"words": batch})[0].argmax(1).tolist() == labels.tolist()
    with pytest.raises(DataError, match="words is float32, not str"):
        module(np.zeros((4, 2), np.float32), labels)


def test_the_strings_run_is_the_bound_run(tmp_path: Path) -> None:
    """Without the words, the ids are bound in place: losses are the same."""
    model = words()
    del model.graph.node[0]
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "length"]))
    of_ids = loaded(artifacts(tmp_path / "ids", model))
    of_words = loaded(artifacts(tmp_path / "words", words()))
    batch, labels = np.array([["red", "blue"], ["green", "?"]]), np.array([2, 1])
    ids = np.array([[1, 3], [2, 0]])
    assert [step(*of_words, batch, labels) for _ in range(5)] == [step(*of_ids, ids, labels) for _ in range(5)]


def test_a_program_in_another_language_needs_only_names(plain: dict[str, Path]) -> None:
    """A training loop by sessions alone, by the names of inputs and outputs that the documentation states."""
    module, optimizer = loaded(plain)
    optimizer.set_learning_rate(0.01)
    expected = [step(module, optimizer, rows(i), LABELS) for i in range(3)]
    training, update = (
        ort.InferenceSession(plain[kind], providers=["CPUExecutionProvider"])
        for kind in ("training_model", "optimizer_model")
    )
    weights = {n: p.data for n, p in CheckpointState.load_checkpoint(plain["checkpoint"]).parameters}
    states = {
        i.name: np.zeros(i.shape, np.int64 if i.name == "step" else np.float32)
        for i in update.get_inputs()
        if i.name not in weights and not i.name.endswith("_grad") and i.name != "learning_rate"
    }
    buffers = {n: np.zeros_like(w) for n, w in weights.items()}
    found = []
    for index in range(3):
        feeds = {"image": rows(index), "labels": LABELS, "lazy_reset_grad": np.array(True), **weights}
        feeds |= {f"{n}_grad.accumulation.buffer": b for n, b in buffers.items()}
        loss, *gradients = training.run(["loss", *(f"{n}_grad.accumulation.out" for n in weights)], feeds)
        found.append(float(loss))
        buffers = dict(zip(weights, gradients, strict=True))
        feeds = {
            "learning_rate": np.array(0.01, np.float32),
            **weights,
            **states,
            **{f"{n}_grad": g for n, g in buffers.items()},
        }
        kept = [*weights, *states]
        updated = dict(zip(kept, update.run([f"{n}.out" for n in kept], feeds), strict=True))
        weights, states = {n: updated[n] for n in weights}, {n: updated[n] for n in states}
    np.testing.assert_allclose(found, expected, rtol=1e-6)


STATISTICS = """
<ir_version: 10, opset_import: ["" : 20]>
normalized (float[batch, 64] image) => (float[batch, 10] scores)
{
    normal = BatchNormalization <momentum = 0.9> (image, scale, shift, mean, variance)
    scores = Gemm (normal, weight)
}
"""


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_running_statistics_follow_the_batches_where_asked(tmp_path: Path, batch_statistics: bool) -> None:
    random = np.random.default_rng(0)
    model = parser.parse_model(STATISTICS)
    content = {"scale": np.ones(64), "shift": np.zeros(64), "mean": np.zeros(64), "variance": np.ones(64)}
    for name, array in (content | {"weight": random.standard_normal((64, 10)) / 8}).items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    module, _ = loaded(artifacts(tmp_path, model, batch_statistics=batch_statistics))
    assert [p.name for p in module.state.parameters.values() if not p.requires_grad] == ["mean", "variance"]
    batch = rows() * 3 + 2
    module(batch, LABELS)
    mean, variance = (module.state.parameters[n].data for n in ("mean", "variance"))
    if batch_statistics:
        np.testing.assert_allclose(mean, 0.1 * batch.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variance, 0.9 + 0.1 * batch.var(0, ddof=1), rtol=1e-5)
    else:
        assert not mean.any() and (variance == 1).all()


@pytest.mark.parametrize(("batch_statistics", "correction"), [(False, 0), (True, 1)])
def test_a_training_mode_keeps_the_variance_that_onnx_says(
    tmp_path: Path, batch_statistics: bool, correction: int
) -> None:
    random = np.random.default_rng(0)
    model = parser.parse_model(STATISTICS.replace("momentum = 0.9", "momentum = 0.7, training_mode = 1"))
    model.graph.node[0].output.extend(["new_mean", "new_variance"])
    content = {"scale": np.ones(64), "shift": np.zeros(64), "mean": np.zeros(64), "variance": np.full(64, 3.0)}
    for name, array in (content | {"weight": random.standard_normal((64, 10)) / 8}).items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    module, _ = loaded(artifacts(tmp_path, model, batch_statistics=batch_statistics))
    expected = 3.0
    for scale in (1, 2):
        module(rows() * scale, LABELS)
        expected = 0.7 * expected + 0.3 * (rows() * scale).var(0, ddof=correction)
    np.testing.assert_allclose(module.state.parameters["variance"].data, expected, rtol=1e-5)


def test_running_statistics_are_those_of_torch(tmp_path: Path) -> None:
    class Twice(nn.Module):
        """A normalization that is called twice in a step."""

        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2, momentum=0.3)

        def forward(self, x):
            return self.norm(self.convolution(torch.relu(self.norm(self.convolution(x)))))

    torch.manual_seed(0)
    module, x, y = Twice(), torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)
    file = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = {"training": torch.onnx.TrainingMode.TRAINING, "dynamic_axes": {"x": {0: "n"}}}
        torch.onnx.export(module, (x,), file, input_names=["x"], dynamo=False, opset_version=20, **kept)
    made = artifacts(tmp_path, file, loss=LossType.MSELoss, batch_statistics=True)
    ours, _ = loaded(made)
    module.train()
    for rows_of in (x, x[:1] * 2):
        ours(rows_of.numpy(), y[: len(rows_of)].numpy())
        module(rows_of)
    for name in ("mean", "var"):
        expected = getattr(module.norm, f"running_{name}").numpy()
        np.testing.assert_allclose(ours.state.parameters[f"norm.running_{name}"].data, expected, rtol=1e-5, atol=1e-6)


CONSTANTS = """
<ir_version: 10, opset_import: ["" : 20]>
constants (float[batch, 64] image) => (float[batch, 10] scores)
{
    bias = Constant <value_floats = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]> ()
    scale = Constant <value_float = 0.5> ()
    product = Gemm (image, weight, bias)
    scores = Mul (product, scale)
}
"""


def test_weights_may_be_constant_nodes(tmp_path: Path) -> None:
    model = parser.parse_model(CONSTANTS)
    weight = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32) / 8
    constant = helper.make_node("Constant", [], ["weight"], value=numpy_helper.from_array(weight))
    model.graph.node.insert(0, constant)
    asked = {(): {"weight", "bias"}, ("weight",): {"weight"}, ("weight", "scale"): {"weight", "scale"}}
    for index, (names, trained) in enumerate(asked.items()):
        module, optimizer = loaded(artifacts(tmp_path / str(index), model, requires_grad=list(names) or None))
        assert {p.name for p in module.state.parameters.values() if p.requires_grad} == trained
        losses = [step(module, optimizer, rows(), LABELS) for _ in range(5)]
        assert losses[-1] < losses[0]
        module.export_model_for_inferencing(tmp_path / "trained.onnx")
        scores = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"image": rows()})[0]
        assert np.abs(scores - rows() @ weight * 0.5).max() > 1e-3


class Reconstruction(onnxblock.TrainingBlock):
    """A loss of two values of the model, with no input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.difference = onnxblock.blocks.Sub()
        self.square = onnxblock.blocks.Pow(2.0)
        self.mean = onnxblock.blocks.ReduceMean(keepdims=False)

    def build(self, one: str, other: str) -> str:
        return self.mean(self.square(self.difference(one, other)))


def test_a_loss_without_labels(tmp_path: Path) -> None:
    paths = artifacts(tmp_path, without_dropout(), loss=Reconstruction(), loss_input_names=["hidden", "image"])
    module, optimizer = loaded(paths)
    assert module.input_names() == ["image"]
    assert [p.name for p in module.state.parameters.values() if p.requires_grad] == ["first_weight", "first_bias"]
    before = np.mean((_hidden(module) - rows()) ** 2)
    np.testing.assert_allclose(step(module, optimizer, rows()), before, rtol=1e-5)
    for _ in range(20):
        last = step(module, optimizer, rows())
    assert last < before


def test_a_target_may_be_a_scalar(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    g (float[batch, 64] image) => (float mean) {
        y = MatMul (image, w)
        mean = ReduceMean <keepdims = 0> (y)
    }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 2), np.float32), "w"))
    module, optimizer = loaded(
        generate_artifacts(model, loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    )
    assert step(module, optimizer, rows(), np.array(1, np.float32)) > step(
        module, optimizer, rows(), np.array(1, np.float32)
    )


def _hidden(module: Module) -> np.ndarray:
    weights = module.state.parameters
    return rows() @ weights["first_weight"].data.T + weights["first_bias"].data


HALF = """
<ir_version: 10, opset_import: ["" : 20]>
stored (%s[batch, 64] image) => (float[batch, 10] scores)
{
    table = Cast <to = 1> (stored)
    pixels = Cast <to = 1> (image)
    hidden = MatMul (pixels, table)
    scores = MatMul (hidden, head)
}
"""


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_weights_that_are_stored_in_half_the_bits(tmp_path: Path, kind: str) -> None:
    """bfloat16 is no type of numpy, nor of the reader of safetensors for numpy."""
    random = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, kind.upper()))
    stored = (random.standard_normal((64, 8)) / 8).astype(dtype)
    model = parser.parse_model(HALF % kind)
    model.graph.initializer.append(numpy_helper.from_array(stored, "stored"))
    model.graph.initializer.append(numpy_helper.from_array(random.standard_normal((8, 10), np.float32), "head"))
    module, optimizer = loaded(artifacts(tmp_path, model, frozen_params=["stored"]))
    losses = [step(module, optimizer, rows().astype(dtype), LABELS) for _ in range(5)]
    assert losses[-1] < losses[0]
    CheckpointState.save_checkpoint(module.state, tmp_path / "trained")
    again = CheckpointState.load_checkpoint(tmp_path / "trained").parameters["stored"]
    assert again.data.dtype == dtype and again.data.tobytes() == stored.tobytes()
    module.export_model_for_inferencing(tmp_path / "trained.onnx")
    kept = {i.name: i for i in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert numpy_helper.to_array(kept["stored"]).tobytes() == stored.tobytes()


def test_doubles_are_trained(tmp_path: Path) -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        line (double[batch, 64] image) => (double[batch, 10] scores) { scores = Gemm (image, weight) }"""
    )
    weight = np.random.default_rng(0).standard_normal((64, 10)) / 8
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    module, optimizer = loaded(artifacts(tmp_path, model, optimizer=OptimType.SGD))
    optimizer.set_learning_rate(0.5)
    step(module, optimizer, rows().astype(np.float64), LABELS)
    x = rows().astype(np.float64)
    scores = np.exp(x @ weight)
    slope = x.T @ (scores / scores.sum(1, keepdims=True) - np.eye(10)[LABELS]) / len(x)
    np.testing.assert_allclose(module.state.parameters["weight"].data, weight - 0.5 * slope, rtol=1e-10)


def test_doubles_are_normalized_in_double(tmp_path: Path) -> None:
    """LayerNormalization gives their mean and deviation in single precision."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        line (double[batch, 64] image) => (double[batch, 10] scores) {
            normal = LayerNormalization (image, scale)
            scores = Gemm (normal, weight)
        }"""
    )
    generator = np.random.default_rng(0)
    scale, weight = 1 + generator.standard_normal(64) / 8, generator.standard_normal((64, 10)) / 8
    model.graph.initializer.extend((numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(weight, "weight")))
    module, optimizer = loaded(artifacts(tmp_path, model, optimizer=OptimType.SGD))
    optimizer.set_learning_rate(0.5)
    step(module, optimizer, rows().astype(np.float64), LABELS)
    given = [torch.tensor(v, requires_grad=True) for v in (scale, weight)]
    scores = torch.nn.functional.layer_norm(torch.tensor(rows()).double(), (64,), given[0]) @ given[1]
    torch.nn.functional.cross_entropy(scores, torch.tensor(LABELS)).backward()
    for name, value in zip(("scale", "weight"), given, strict=True):
        expected = (value - 0.5 * value.grad).detach().numpy()
        np.testing.assert_allclose(module.state.parameters[name].data, expected, rtol=1e-9)


def renamed(old: str, new: str) -> onnx.ModelProto:
    """The network with another name for one of its values."""
    model = digits.network()
    for value in (*model.graph.input, *model.graph.initializer):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    return model


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first_weight", "step"),
        ("first_weight", "step.out"),
        ("first_weight", "learning_rate"),
        ("first_weight", "lazy_reset_grad"),
        ("first_weight", "val_3"),
        ("first_weight", "const_0"),
        ("first_bias", "first_weight.out"),
        ("first_bias", "first_weight_grad"),
        ("first_bias", "first_weight.exp_avg"),
        ("first_bias", "first_weight_grad.accumulation.buffer"),
        ("first_bias", "first_weight_grad.accumulation.out"),
        ("first_weight", "labels"),
        ("hidden", "labels"),
        ("hidden", "lazy_reset_grad"),
        ("hidden", "loss"),
        ("hidden", "val_0"),
    ],
)
def test_whoever_has_a_name_keeps_it(tmp_path: Path, old: str, new: str) -> None:
    optimizer = onnxblock.optim.AdamW(weight_decay=0.1, clip_grad=onnxblock.optim.ClipGradNorm(0.1))
    found = []
    for name, model in (("plain", digits.network()), ("renamed", renamed(old, new))):
        paths = artifacts(tmp_path / name, model, optimizer=optimizer)
        module, trained = loaded(paths)
        found.append([step(module, trained, rows(), LABELS) for _ in range(3)])
        module.export_model_for_inferencing(tmp_path / f"{name}.onnx")
    assert found[0] == found[1] and len(set(found[0])) == 3
    names = {i.name for i in onnx.load(tmp_path / "renamed.onnx").graph.initializer}
    assert (new in names) == old.startswith("first")


class Own(onnxblock.Block):
    """The loss that the model itself computes."""

    def build(self, *_: str) -> str:
        return "loss"


def test_a_loss_that_the_model_has_keeps_its_name(tmp_path: Path) -> None:
    model = without_dropout()
    model.graph.node.append(helper.make_node("ReduceMean", ["scores"], ["loss"], keepdims=0))
    paths = artifacts(tmp_path, model, loss=Own(), loss_input_names=["scores"])
    module, _ = loaded(paths)
    assert module.output_names() == ["loss"] and np.isfinite(module(rows()))


def test_an_input_of_another_kind_cannot_be_the_target(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"the input labels is FLOAT.*\n.*rename"):
        artifacts(tmp_path / "none", renamed("image", "labels"))
    assert not (tmp_path / "none").exists()


def test_models_too_large_for_one_file_have_their_weights_beside_them(
    plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported twice, so that the weights of the first model are replaced and nothing else is left."""
    monkeypatch.setattr("onnxtrain.portable._LARGEST", 1000)
    module, optimizer = loaded(plain)
    path = tmp_path / "large.onnx"
    for _ in range(2):
        step(module, optimizer, rows(), LABELS)
        module.export_model_for_inferencing(path)
        assert len(list(tmp_path.iterdir())) == 2 and path.stat().st_size < 5000
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        made = session.run(None, {"image": rows()})[0]
        with monkeypatch.context() as patch:
            patch.setattr("onnxtrain.portable._LARGEST", 2**31)
            module.export_model_for_inferencing(tmp_path.parent / "whole.onnx")
        whole = ort.InferenceSession(tmp_path.parent / "whole.onnx", providers=["CPUExecutionProvider"])
        assert (made == whole.run(None, {"image": rows()})[0]).all()
    again = artifacts(tmp_path / "again", str(path))  # type: ignore[arg-type]
    assert float(loaded(again)[0].eval()(rows(), LABELS)) == float(module.eval()(rows(), LABELS))
