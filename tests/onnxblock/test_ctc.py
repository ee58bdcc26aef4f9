"""CTC against torch.nn.functional.ctc_loss: losses and gradients, all lengths, what cannot be aligned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from onnxblock.test_losses import run

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock.loss import CTCLoss

RNG = np.random.default_rng(0)


def batch(steps: int = 9, size: int = 6, classes: int = 4, longest: int = 4, seed: int = 0) -> tuple[Any, ...]:
    """Logarithms of probabilities, targets with repeated labels, and lengths, some of them 0."""
    random = np.random.default_rng(seed)
    targets = random.integers(1, classes, (size, longest))
    targets[0] = 2
    ends = random.integers(0, longest + 1, size)
    ends[0], ends[1] = longest, 0
    return random.normal(size=(steps, size, classes)), targets, random.integers(2 * longest, steps + 1, size), ends


def compare(loss: CTCLoss, given: tuple[Any, ...], dtype: str, rtol: float, **other: Any) -> None:
    scores, targets, lengths, ends = given
    log_probs = torch.log_softmax(torch.tensor(scores.astype(dtype)), -1)
    leaf = log_probs.double().clone().requires_grad_()
    expected = F.ctc_loss(
        leaf, *map(torch.tensor, (targets, lengths, ends)), loss.blank, loss.reduction, loss.zero_infinity
    )
    feeds = {"targets": targets, "input_lengths": lengths, "target_lengths": ends}
    made = run(loss, [log_probs.numpy()], feeds | other)
    np.testing.assert_allclose(made[0], expected.item(), rtol=rtol)
    # torch takes it for granted that a log_softmax comes before: gradients are compared behind it
    scores = log_probs.double().clone().requires_grad_()
    (theirs,) = torch.autograd.grad(expected, leaf)
    behind = [
        torch.autograd.grad(scores.log_softmax(-1), scores, g.double())[0] for g in (torch.tensor(made[1]), theirs)
    ]
    np.testing.assert_allclose(behind[0].numpy(), behind[1].numpy(), rtol=rtol * 10, atol=rtol)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("seed", range(3))
def test_random_lengths(seed: int, reduction: str) -> None:
    compare(CTCLoss(reduction=reduction), batch(seed=seed), "float64", 1e-9)
    compare(CTCLoss(reduction=reduction), batch(seed=seed), "float32", 1e-5)


def test_another_blank() -> None:
    scores, targets, lengths, ends = batch()
    compare(CTCLoss(blank=3), (scores, (targets - 1) % 3, lengths, ends), "float64", 1e-9)


def test_targets_without_any_label() -> None:
    scores, targets, lengths, ends = batch()
    compare(CTCLoss(), (scores, targets[:, :0], lengths, ends * 0), "float64", 1e-9)


def test_what_lies_behind_a_target_is_not_read() -> None:
    scores, targets, lengths, ends = batch()
    for row, end in zip(targets, ends, strict=True):
        row[end:] = -1
    made = [run(CTCLoss(), [np.log(np.abs(scores) / 9)], named(t, lengths, ends)) for t in (targets, np.abs(targets))]
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)


def named(targets: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
    return {"targets": targets, "input_lengths": lengths, "target_lengths": ends}


def test_what_cannot_be_aligned() -> None:
    scores, targets, lengths, ends = batch()
    lengths[0] = 4  # four times the same label takes seven steps
    compare(CTCLoss(zero_infinity=True), (scores, targets, lengths, ends), "float64", 1e-9)
    compare(CTCLoss(0, "sum", True), (scores, targets, lengths, ends), "float32", 1e-5)
    made = run(CTCLoss(reduction="sum"), [scores.astype(np.float32)], named(targets, lengths, ends))
    assert np.isposinf(made[0]) and np.isfinite(made[1]).all() and not made[1][:, 0].any()


def test_probabilities_of_zero() -> None:
    scores, targets, lengths, ends = batch()
    log_probs = torch.log_softmax(torch.tensor(scores), -1)
    log_probs[0, :, 1] = -torch.inf
    expected = F.ctc_loss(log_probs, *map(torch.tensor, (targets, lengths, ends)), reduction="sum", zero_infinity=True)
    loss, gradient = run(
        CTCLoss(reduction="sum", zero_infinity=True), [log_probs.numpy()], named(targets, lengths, ends)
    )
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-9)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("what", ["label", "negative label", "input length", "target length"])
def test_labels_and_lengths_out_of_range_are_errors(what: str) -> None:
    scores, targets, lengths, ends = batch()
    if "label" in what:
        targets[0, 0] = -1 if "negative" in what else 4
    elif what == "input length":
        lengths[0] = 10
    else:
        ends[0] = 5
    with pytest.raises(Exception, match=r"[Oo]ut of range|out of data bounds"):
        run(CTCLoss(), [scores.astype(np.float32)], named(targets, lengths, ends))


def test_scores_of_another_rank_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"takes \(time, batch, classes\)"):
        run(CTCLoss(), [np.zeros((3, 4), np.float32)], {})


def test_a_model_learns_to_read(tmp_path: Path) -> None:
    """Sequences whose labels are in their features, at places nobody says."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("LogSoftmax", ["scores"], ["y"], axis=-1),
    ]
    weight = numpy_helper.from_array(RNG.normal(size=(5, 4)).astype(np.float32) * 0.1, "w")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["time", "batch", 5])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["time", "batch", 4])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    files = generate_artifacts(model, loss=LossType.CTCLoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    module = Module(files["training_model"], state, files["eval_model"])
    optimizer = Optimizer(files["optimizer_model"], module)
    optimizer.set_learning_rate(0.1)
    assert module.input_names() == ["x", "targets", "input_lengths", "target_lengths"]
    losses = []
    for _ in range(40):
        size = int(RNG.integers(2, 6))
        targets = RNG.integers(1, 4, (size, 3))
        features = np.zeros((8, size, 5), np.float32)
        for row in range(size):
            features[np.sort(RNG.choice(8, 3, replace=False)), row, targets[row]] = 1
        features[..., 4] = features.sum(-1) == 0
        losses.append(float(module(features, targets, np.full(size, 8), np.full(size, 3))))
        optimizer.step()
        module.lazy_reset_grad()
    assert np.mean(losses[-5:]) < 0.35 * losses[0]
