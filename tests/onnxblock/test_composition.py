"""Losses and optimizers that users compose of blocks, trained next to the same in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import ArtifactError
from onnxtrain.onnxblock import optim

RNG = np.random.default_rng(0)
SHAPES = {"body": (6, 8), "scores.weight": (8, 3), "size.weight": (8, 1)}
WEIGHTS = {n: RNG.normal(size=s).astype(np.float32) * 0.5 for n, s in SHAPES.items()}
X = RNG.normal(size=(32, 6)).astype(np.float32)
LABELS = X[:, :3].argmax(1)
SIZES = (X[:, 3:4] - X[:, 4:5]).astype(np.float32)


def two_heads() -> onnx.ModelProto:
    """A model of classes and of a number."""
    nodes = [
        helper.make_node("MatMul", ["x", "body"], ["a"]),
        helper.make_node("Tanh", ["a"], ["h"]),
        helper.make_node("MatMul", ["h", "scores.weight"], ["scores"]),
        helper.make_node("MatMul", ["h", "size.weight"], ["size"]),
    ]
    values = [helper.make_tensor_value_info(n, 1, ["batch", k]) for n, k in {"x": 6, "scores": 3, "size": 1}.items()]
    tensors = [numpy_helper.from_array(v, n) for n, v in WEIGHTS.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


class WeightedAverageLoss(onnxblock.Block):
    """The documented example: blocks in, a block out."""

    def __init__(self) -> None:
        self.cross_entropy, self.mse = onnxblock.loss.CrossEntropyLoss(), onnxblock.loss.MSELoss()
        self.first, self.second = onnxblock.blocks.Constant(0.4), onnxblock.blocks.Constant(0.6)
        self.mul, self.add = onnxblock.blocks.Mul(), onnxblock.blocks.Add()

    def build(self, scores: str, size: str) -> str:
        return self.add(
            self.mul(self.first(), self.cross_entropy(scores, labels_name="kinds")),
            self.mul(self.second(), self.mse(size, target_name="sizes")),
        )


class LogCosh(onnxblock.Block):
    """A loss of blocks and of operators: the mean of ``log cosh(x - y)``, as ``d + softplus(-2d) - log 2``."""

    def build(self, name: str, target_name: str = "target") -> str:
        target = onnxblock.blocks.InputLike(name)(target_name)
        d = self.value(onnxblock.blocks.Sub()(name, target))
        with self.op.arithmetic():
            made = d + self.op.Softplus(d * -2.0) - float(np.log(2))
        return onnxblock.blocks.ReduceMean(keepdims=False)(made.name)


class RMSprop(optim.Optimizer):
    """An optimizer of one's own: a state, and what a parameter becomes."""

    def __init__(self, alpha: float = 0.9, eps: float = 1e-8, **given: Any) -> None:
        super().__init__(**given)
        self.alpha, self.eps = alpha, eps

    def update(self, slot: optim.Slot) -> None:
        square, g, p = slot.state("square_avg"), slot.gradient, slot.parameter
        new = square * self.alpha + g * g * (1.0 - self.alpha)
        slot.update(square, new)
        slot.update(p, p - g / (self.op.Sqrt(new) + self.eps) * self.rate_of(slot))


def losses_of(
    files: dict[str, Path], batch: tuple[np.ndarray, ...], rate: float, count: int
) -> tuple[list[float], Any]:
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    module = Module(files["training_model"], state, files["eval_model"])
    optimizer, made = Optimizer(files["optimizer_model"], module), []
    optimizer.set_learning_rate(rate)
    for _ in range(count):
        made.append(float(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    return made, state


def torch_losses(loss: Any, names: list[str], rate: float, count: int, alpha: float) -> tuple[list[float], Any]:
    leaves = {n: torch.tensor(v.astype(np.float64), requires_grad=n in names) for n, v in WEIGHTS.items()}
    optimizer = torch.optim.RMSprop([leaves[n] for n in names], lr=rate, alpha=alpha)
    made = []
    for _ in range(count):
        h = torch.tanh(torch.tensor(X).double() @ leaves["body"])
        value = loss(h @ leaves["scores.weight"], h @ leaves["size.weight"])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        made.append(value.item())
    return made, leaves


def agree(made: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    np.testing.assert_allclose(made[0], expected[0], rtol=1e-4)
    assert made[0][-1] < 0.7 * made[0][0]
    for name, leaf in expected[1].items():
        if name in made[1].parameters:
            np.testing.assert_allclose(made[1].parameters[name].data, leaf.detach(), rtol=1e-3, atol=1e-4)


def test_a_weighted_average_of_losses_and_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    files = generate_artifacts(
        two_heads(), loss=WeightedAverageLoss(), optimizer=RMSprop(0.95), artifact_directory=tmp_path
    )
    made = losses_of(files, (X, LABELS, SIZES), 0.01, 25)
    labels, sizes = torch.tensor(LABELS), torch.tensor(SIZES).double()

    def loss(scores: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return 0.4 * F.cross_entropy(scores, labels) + 0.6 * F.mse_loss(size, sizes)

    agree(made, torch_losses(loss, list(WEIGHTS), 0.01, 25, 0.95))


def test_a_loss_of_ones_own_on_one_of_two_outputs(tmp_path: Path) -> None:
    files = generate_artifacts(
        two_heads(),
        loss=LogCosh(),
        loss_input_names=["size"],
        optimizer=RMSprop(),
        artifact_directory=tmp_path,
        additional_output_names=["scores"],
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    assert [p.name for p in state.parameters.values() if not p.requires_grad] == ["scores.weight"]
    loss, scores = Module(files["training_model"], state)(X, SIZES)
    assert loss.shape == () and scores.shape == (32, 3)
    files = generate_artifacts(
        two_heads(), loss=LogCosh(), loss_input_names=["size"], optimizer=RMSprop(), artifact_directory=tmp_path
    )
    made = losses_of(files, (X, SIZES), 0.01, 25)
    d = torch.tensor(SIZES).double()
    expected = torch_losses(lambda _, size: (size - d).cosh().log().mean(), ["body", "size.weight"], 0.01, 25, 0.9)
    agree(made, expected)


def test_blocks_as_the_predecessor_documents_them() -> None:
    """``onnxblock.base``, a block called by name, ``requires_grad``, both models, an optimizer of the parameters."""

    class Training(onnxblock.TrainingBlock):
        def __init__(self) -> None:
            super().__init__()
            self.loss = WeightedAverageLoss()

        def build(self, scores: str, size: str) -> str:
            return self.loss(scores, size)

    block = Training()
    for name in SHAPES:
        block.requires_grad(name, name != "body")
    with onnxblock.base(two_heads()):
        assert block("scores", "size")
        training, evaluation = block.to_model_proto()
        trainable, frozen = block.parameters()
    assert [t.name for t in trainable] == ["scores.weight", "size.weight"] and [t.name for t in frozen] == ["body"]
    assert [i.name for i in evaluation.graph.input][:3] == ["x", "kinds", "sizes"]
    assert "TanhGrad" not in {n.op_type for n in training.graph.node}
    optimizer = RMSprop()
    with onnxblock.empty_base():
        optimizer(trainable)
        made = optimizer.to_model_proto()
    onnx.checker.check_model(made, full_check=True)
    assert {i.name for i in made.graph.input} >= {"size.weight", "size.weight_grad", "size.weight.square_avg"}


def test_a_model_made_of_blocks_alone() -> None:
    class Network(onnxblock.ForwardBlock):
        def build(self, x: str) -> str:
            h = onnxblock.blocks.Sigmoid()(onnxblock.blocks.Linear(4, 8, prefix="first.")(x))
            return onnxblock.blocks.Linear(8, 2, bias=False, prefix="second.")(h)

    network = Network()
    with onnxblock.empty_base() as base:
        base.input("x", onnx_float(), ["batch", 4])
        network("x")
        made = network.to_model_proto()
    weights = {i.name: torch.tensor(numpy_helper.to_array(i)) for i in made.graph.initializer}
    assert list(weights) == ["first.linear.weight", "first.linear.bias", "second.linear.weight"]
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    h = torch.sigmoid(F.linear(torch.tensor(x), weights["first.linear.weight"], weights["first.linear.bias"]))
    (found,) = onnx.reference.ReferenceEvaluator(made).run(None, {"x": x})
    np.testing.assert_allclose(found, F.linear(h, weights["second.linear.weight"]), rtol=1e-5, atol=1e-6)


def onnx_float() -> Any:
    import onnx_ir

    return onnx_ir.DataType.FLOAT


def test_two_blocks_may_not_claim_one_input_in_two_ways() -> None:
    with pytest.raises(ArtifactError, match="the input labels is INT64, not FLOAT"), onnxblock.base(two_heads()):
        onnxblock.loss.CrossEntropyLoss()("scores", "labels")
        onnxblock.loss.MSELoss()("size", "labels")
