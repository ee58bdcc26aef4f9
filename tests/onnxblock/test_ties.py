"""Weights that an exporter made two of are tied again; those that it merged are parameters of their own again."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import ArtifactError, GraphError
from onnxtrain.onnxblock import loss, optim

TABLE = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
IDS = np.array([[0, 1, 2], [3, 4, 6]])
_SCOPES = "pkg.torch.onnx.name_scopes"


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
        node.metadata_props.add(key=_SCOPES, value=str(["", module, "call"]))
    weights, _ = trained(model, tmp_path, tie=False)
    assert {*weights} == {"table", "head", "first.norm.weight"}  # one module that is called twice
    model.graph.node[3].metadata_props[0].value = str(["", "b", "b.ln", "call"])
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
