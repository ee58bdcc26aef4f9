"""Each model trains 50 steps from its .onnx file as it does in torch: same start, same data, same losses."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import skl2onnx
import torch
import torch.nn.functional as F
from api.zoo import ZOO, save
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.onnxblock import optim

STEPS, RATE = 50, 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_losses_are_those_of_torch(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    torch.manual_seed(0)
    module = entry.module().train()
    path = save(module, entry, tmp_path)
    files = generate_artifacts(
        path,
        loss=entry.artifact_loss,
        optimizer=optim.AdamW(eps=1e-8, weight_decay=1e-2, formula="torch"),
        artifact_directory=tmp_path,
        batch_statistics=True,
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    ours = Module(files["training_model"], state, files["eval_model"])
    optimizer = Optimizer(files["optimizer_model"], ours)
    optimizer.set_learning_rate(RATE)
    its = torch.optim.AdamW(module.parameters(), RATE, weight_decay=1e-2)
    random, differences = np.random.default_rng(1), []
    for _ in range(STEPS):
        *inputs, labels = entry.batch(random)
        loss = entry.loss(module(*map(torch.from_numpy, inputs)), torch.from_numpy(labels))
        its.zero_grad()
        loss.backward()
        its.step()
        made = ours(*inputs, labels)
        optimizer.step()
        ours.lazy_reset_grad()
        differences.append(abs(float(made) - loss.item()) / loss.item())
    assert max(differences) < 1e-4
    module.eval()
    ours.eval()
    with torch.no_grad():
        loss = entry.loss(module(*map(torch.from_numpy, inputs)), torch.from_numpy(labels))
    assert float(ours(*inputs, labels)) == pytest.approx(
        loss.item(), rel=5e-3
    )  # ONNX keeps the biased variance, torch the unbiased


def test_a_scikit_learn_perceptron_goes_on_learning(tmp_path: Path) -> None:
    """Converted by skl2onnx; the loss reads what its Softmax reads, and the steps are torch's from the same weights."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = MLPClassifier((32,), max_iter=2, random_state=0).fit(images, labels)
    model = skl2onnx.to_onnx(fitted, images[:1], options={"zipmap": False}, target_opset=18)
    scores = next(n.input[0] for n in model.graph.node if n.op_type == "Softmax")
    files = generate_artifacts(
        model,
        loss=LossType.CrossEntropyLoss,
        loss_input_names=[scores],
        optimizer=optim.SGD(momentum=0.9),
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    ours = Module(files["training_model"], state, files["eval_model"])
    optimizer = Optimizer(files["optimizer_model"], ours)
    optimizer.set_learning_rate(0.1)
    weights = [torch.tensor(w, dtype=torch.float32, requires_grad=True) for w in (*fitted.coefs_, *fitted.intercepts_)]
    its = torch.optim.SGD(weights, 0.1, momentum=0.9)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        rows = random.integers(0, len(images), 64)
        x, y = images[rows], labels[rows].astype(np.int64)
        hidden = torch.relu(torch.from_numpy(x) @ weights[0] + weights[2])
        loss = F.cross_entropy(hidden @ weights[1] + weights[3], torch.from_numpy(y))
        its.zero_grad()
        loss.backward()
        its.step()
        made = ours(x, y)
        optimizer.step()
        ours.lazy_reset_grad()
        assert float(made) == pytest.approx(loss.item(), rel=1e-4)
    ours.export_model_for_inferencing(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    predicted = session.run(["label"], {"X": images})[0]
    assert (predicted == labels).mean() > (fitted.predict(images) == labels).mean() + 0.1
