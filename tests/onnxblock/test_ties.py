"""Weights that an exporter made two of are tied again; those that it merged are parameters of their own again."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.artifacts import weights as weights_of
from onnxtrain.errors import ArtifactError, GraphError
from onnxtrain.ir.modules import NAMESPACE, namespace
from onnxtrain.onnxblock import loss, optim

TABLE = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
IDS = np.array([[0, 1, 2], [3, 4, 6]])


def language_model(**weights: np.ndarray) -> onnx.ModelProto:
    """A table of embeddings, two normalizations whose weights are one initializer, and a head."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node(
            "LayerNormalization", ["x", "first.norm.weight"], ["a"], name="/first/norm/LayerNormalization"
        ),
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("LayerNormalization", ["t", "first.norm.weight"], ["b"], name="/second/norm/Layer"),
        helper.make_node("MatMul", ["b", "head"], ["scores"]),
    ]
    held = {"table": TABLE, "head": TABLE.T.copy(), "first.norm.weight": np.ones(4, np.float32)} | weights
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "length"])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", "length", 7])
    graph = helper.make_graph(nodes, "g", [ids], [scores], [numpy_helper.from_array(a, n) for n, a in held.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def trained(model: onnx.ModelProto, folder: Path, **options) -> tuple[dict[str, np.ndarray], Module]:
    """Weights after two steps, and the module."""
    given = {"loss": loss.CrossEntropyLoss(axis=-1), "optimizer": optim.SGD(), "artifact_directory": folder}
    files = generate_artifacts(model, **given | options)
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    module = Module(files["training_model"], state, files["eval_model"])
    optimizer = Optimizer(files["optimizer_model"], module)
    optimizer.set_learning_rate(0.5)
    for _ in range(2):
        module(IDS, IDS)
        optimizer.step()
        module.lazy_reset_grad()
    return {n: p.data for n, p in state.parameters}, module


@pytest.mark.parametrize("tie", [True, [("table", "head")]])
def test_a_table_and_a_head_are_one_weight(tmp_path: Path, tie: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, module = trained(language_model(), tmp_path / "tied", tie=tie)
        apart, _ = trained(language_model(), tmp_path / "apart", tie=False)
    assert "head" not in weights and not np.array_equal(apart["head"], apart["table"].T)
    module.export_model_for_inferencing(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(exported, full_check=True)
    assert "head" not in {i.name for i in exported.graph.initializer}


def test_the_gradient_of_a_tied_weight_is_the_sum_of_both(tmp_path: Path) -> None:
    def first(folder: str, **options) -> dict[str, np.ndarray]:
        files = generate_artifacts(
            language_model(), loss=loss.CrossEntropyLoss(axis=-1), artifact_directory=tmp_path / folder, **options
        )
        state = CheckpointState.load_checkpoint(files["checkpoint"])
        Module(files["training_model"], state)(IDS, IDS)
        return {n: p.grad for n, p in state.parameters if p.grad is not None}

    apart, tied = first("apart", tie=False), first("tied", tie=True)
    np.testing.assert_allclose(tied["table"], apart["table"] + apart["head"].T, rtol=1e-5, atol=1e-7)


def test_what_could_be_tied_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="head holds the numbers of table.*tie=True"):
        trained(language_model(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(language_model(head=TABLE.T * 2), tmp_path)


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        ([("table", "nothing")], "no weight nothing"),
        ([("table", "first.norm.weight")], "do not hold the same numbers"),
        (["table"], "no pair"),
        ([("table", "table")], "do not hold"),
    ],
)
def test_what_cannot_be_tied_is_an_error(tmp_path: Path, tie: list, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        generate_artifacts(language_model(), loss=LossType.MSELoss, tie=tie, artifact_directory=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_ones_of_two_modules_are_two_weights(tmp_path: Path) -> None:
    weights, _ = trained(language_model(), tmp_path, tie=False)
    first, second = weights["first.norm.weight"], weights["second.norm.weight"]
    assert not np.array_equal(first, second) and not (first == 1).any()


def test_nodes_of_torch_onnx_say_their_modules(tmp_path: Path) -> None:
    model = language_model()
    for node, module in zip(model.graph.node, ("wte", "a.ln", "", "a.ln", "head"), strict=True):
        node.metadata_props.add(key=NAMESPACE, value=namespace([("", "m.Model"), (module, "m.Part")], "call", "aten"))
    weights, _ = trained(model, tmp_path, tie=False)
    assert {*weights} == {"table", "head", "first.norm.weight"}  # one module that is called twice
    model.graph.node[3].metadata_props[0].value = namespace([("b", "m.Block"), ("b.ln", "m.Part")], "call", "aten")
    weights, _ = trained(model, tmp_path, tie=False)
    assert {*weights} == {"table", "head", "first.norm.weight", "b.ln.weight"}


def test_learned_weights_are_untied_where_that_is_asked_for(tmp_path: Path) -> None:
    model = language_model(**{"first.norm.weight": np.array([1.0, 0.5, 2.0, 0.7], np.float32)})
    weights, _ = trained(model, tmp_path, tie=False)
    assert "second.norm.weight" not in weights
    weights, _ = trained(model, tmp_path, tie=False, untie=["first.norm.weight"])
    assert not np.array_equal(weights["first.norm.weight"], weights["second.norm.weight"])
    for name, message in (("table", "not read by several modules"), ("nothing", "no initializer nothing")):
        with pytest.raises(GraphError, match=message):
            trained(model, tmp_path, untie=[name])


def test_a_bias_and_a_running_mean_that_were_merged_part(tmp_path: Path) -> None:
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "bn.weight", "bn.bias", "bn.bias", "bn.weight"], ["n"]),
        helper.make_node("GlobalAveragePool", ["n"], ["p"]),
        helper.make_node("Flatten", ["p"], ["scores"]),
    ]
    held = {"w": TABLE[:6, :3].reshape(2, 1, 3, 3), "bn.weight": ones, "bn.bias": zeros}
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 5, 5])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph(nodes, "g", [x], [scores], [numpy_helper.from_array(a, n) for n, a in held.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    files = generate_artifacts(model, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    found = {n: p.requires_grad for n, p in state.parameters}
    assert found == {"w": True, "bn.weight": True, "bn.bias": True, "running_mean": False, "running_var": False}


class Layer(nn.Module):
    """A linear layer without a bias at first, and a normalization as it starts out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class Layers(nn.Module):
    """Several layers; where they are copies, all their weights are equal at first."""

    def __init__(self, count: int, copied: bool = False) -> None:
        super().__init__()
        first = Layer()
        self.layers = nn.ModuleList([copy.deepcopy(first) if copied else Layer() for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class CalledAgain(nn.Module):
    """A layer that is called three times, and perhaps another that starts out the same."""

    def __init__(self, other: bool = True) -> None:
        super().__init__()
        self.one, self.other = Layer(), Layer() if other else nn.Identity()

    def forward(self, x):
        return self.other(self.one(self.one(self.one(x))))


class Sharing(nn.Module):
    """Three normalizations, the scale of the first two is one parameter."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.norms = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(count)])
        self.norms[1][0].weight = self.norms[0][0].weight

    def forward(self, x):
        return self.norms(x)


class Numbered(nn.Module):
    """A normalization that is called twice and one whose name is what the exporter calls a second call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_1 = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(torch.tanh(self.norm_1(torch.tanh(self.norm(x)))))


def exported(module: nn.Module, x: torch.Tensor, file: Path) -> Path:
    """What TorchScript's exporter writes, which merges equal initializers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (x,), file, input_names=["x"], dynamo=False, opset_version=20)
    return file


def compare_steps(module: nn.Module, x: torch.Tensor, folder: Path, **options) -> dict[str, np.ndarray]:
    """Five steps beside eager PyTorch; the weights after them."""
    y = torch.randn(*module(x).shape)
    file = exported(module, x, folder / "model.onnx")
    given = {"loss": LossType.MSELoss, "optimizer": optim.SGD(), "artifact_directory": folder}
    files = generate_artifacts(file, **given | options)
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    trained, eager = Module(files["training_model"], state), torch.optim.SGD(module.parameters(), 0.1)
    optimizer = Optimizer(files["optimizer_model"], trained)
    optimizer.set_learning_rate(0.1)
    for _ in range(5):
        loss_here = trained(x.numpy(), y.numpy())
        optimizer.step()
        trained.lazy_reset_grad()
        loss_there = nn.functional.mse_loss(module(x), y)
        eager.zero_grad()
        loss_there.backward()
        eager.step()
        np.testing.assert_allclose(loss_here, loss_there.item(), rtol=1e-4)
    weights = {n: p.data for n, p in state.parameters if p.requires_grad}
    for name, parameter in module.named_parameters():
        if name in weights:
            np.testing.assert_allclose(weights[name], parameter.detach().numpy(), rtol=1e-3, atol=1e-4)
    assert len(weights) == len({id(p) for p in module.parameters()})
    return weights


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_parameters_that_an_exporter_merged_are_several(tmp_path: Path, count: int, copied: bool, dims: int) -> None:
    torch.manual_seed(count)
    module = Layers(count, copied)
    weights = compare_steps(module, torch.randn(*(5, 3, 8)[-dims:]), tmp_path)
    assert {n for n, p in module.named_parameters() if p.ndim == 1} <= weights.keys()  # matrices may be transposed


@pytest.mark.parametrize("make", [CalledAgain, lambda: CalledAgain(False), Sharing, lambda: Sharing(2), Numbered])
@pytest.mark.parametrize("dims", [2, 3])
def test_what_one_module_has_stays_one(tmp_path: Path, make: type[nn.Module], dims: int) -> None:
    torch.manual_seed(0)
    compare_steps(make(), torch.randn(*(5, 3, 8)[-dims:]), tmp_path)


def test_layers_of_a_container_have_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Tanh()) for _ in range(3)])
    model = onnx.load(exported(module, torch.randn(5, 4), tmp_path / "model.onnx"))
    merged = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    kept = [node for node in model.graph.node if node.op_type != "Identity"]
    for node in kept:  # as programs that simplify models leave them
        node.input[:] = [merged.get(name, name) for name in node.input]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    found = {decision.name for decision in weights_of(model)}
    assert found == {f"{k}.0.{part}" for k in range(3) for part in ("weight", "bias")}


def test_a_head_stays_tied_where_normalizations_part(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.norms = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Tanh()) for _ in range(3)])
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.norms(self.table(x)))

    torch.manual_seed(0)
    compare_steps(Model(), torch.from_numpy(IDS), tmp_path, tie=True)
