"""Linear models and scalers of ai.onnx.ml: written out they compute what onnxruntime computes, and can be trained."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from releases import needs_opset, needs_release

from onnxtrain import api, onnxblock
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ArtifactError, GraphError
from onnxtrain.gradient_graphs import gradient_graph

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 4)).astype(np.float32)
X[2] = 0
COEFFICIENTS, INTERCEPTS = RNG.normal(size=12).tolist(), RNG.normal(size=3).tolist()
LINEAR = {"coefficients": COEFFICIENTS, "intercepts": INTERCEPTS}
INTS, TEXTS = {"classlabels_ints": [3, 5, 9]}, {"classlabels_strings": ["a", "ü", "c"]}
ONE = {"coefficients": COEFFICIENTS[:4], "intercepts": [0.1], "classlabels_ints": [2, 7]}


def model(op_type: str, kind: int = TensorProto.FLOAT, **attributes: Any) -> onnx.ModelProto:
    """One node over (rows, 4)."""
    outputs = ["label", "scores"] if op_type == "LinearClassifier" else ["scores"]
    node = helper.make_node(op_type, ["x"], outputs, "linear", domain="ai.onnx.ml", **attributes)
    labels = TensorProto.STRING if "classlabels_strings" in attributes else TensorProto.INT64
    kinds = {"label": labels, "scores": TensorProto.FLOAT}
    made = [helper.make_tensor_value_info(n, kinds[n], None) for n in outputs]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", kind, ["rows", 4])], made)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


CASES = {
    "scaler": model("Scaler", offset=[0.1, -1.0, 0.0, 2.0], scale=[2.0, 0.5, 1.0, -1.0]),
    "scaler of one number": model("Scaler", offset=[0.5], scale=[3.0]),
    "scaler of integers": model("Scaler", TensorProto.INT64, offset=[0.5], scale=[3.0]),
    "norm l1": model("Normalizer", norm="L1"),
    "norm l2": model("Normalizer", norm="L2"),
    "norm max": model("Normalizer", norm="MAX"),
    "regressor": model("LinearRegressor", coefficients=COEFFICIENTS, intercepts=INTERCEPTS, targets=3),
    "regressor without intercepts": model("LinearRegressor", coefficients=COEFFICIENTS, targets=3),
    "one score": model("LinearClassifier", post_transform="NONE", **ONE),
    "one logistic score": model("LinearClassifier", post_transform="LOGISTIC", **ONE),
    "texts": model("LinearClassifier", post_transform="SOFTMAX", **LINEAR, **TEXTS),
    **{
        transform: model("LinearClassifier", post_transform=transform, **LINEAR, **INTS)
        for transform in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_onnxruntime(name: str) -> None:
    if name == "one logistic score":
        needs_release("1.31", "LinearClassifier gives one score as it is")
    x = (X * 3).astype(np.int64) if "integers" in name else X
    proto, by = CASES[name], "x"
    if "integers" in name:
        by = "linear.scale"
    made = gradient_graph(proto, by, "scores")
    assert not any(n.domain == "ai.onnx.ml" for n in made.graph.node)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    whole = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for output, expected in zip(whole.get_outputs(), whole.run(None, {"x": x}), strict=True):
        found = session.run([output.name], {"x": x})[0]
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
        else:
            assert found.tolist() == expected.tolist()


def test_classes_are_learned(tmp_path: Path) -> None:
    labels = np.array([0, 1, 2, 0, 1, 2, 0])
    paths = generate_artifacts(
        model("LinearClassifier", post_transform="SOFTMAX", **LINEAR, **TEXTS),
        loss=LossType.CrossEntropyLoss,
        loss_input_names=["scores.raw"],
        optimizer=onnxblock.optim.AdamW(),
        artifact_directory=tmp_path,
    )
    state = api.CheckpointState.load_checkpoint(paths["checkpoint"])
    assert set(state.parameters.keys()) == {"linear.coefficients", "linear.intercepts"}
    module = api.Module(paths["training_model"], state, paths["eval_model"])
    optimizer = api.Optimizer(paths["optimizer_model"], module)
    optimizer.set_learning_rate(0.1)
    losses = []
    for _ in range(100):
        losses.append(float(module(X, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < 0.5 * losses[0]
    module.export_model_for_inferencing(tmp_path / "trained.onnx")
    onnx.checker.check_model(tmp_path / "trained.onnx")
    names = ort.InferenceSession(tmp_path / "trained.onnx").run(["label"], {"x": X})[0]
    assert (names == np.array(["a", "ü", "c"])[labels]).mean() > 0.7


def test_scalers_are_trained_where_that_is_asked_for(tmp_path: Path) -> None:
    pipeline = model("LinearRegressor", coefficients=COEFFICIENTS[:4])
    scaler = helper.make_node("Scaler", ["x"], ["s"], "scaler", domain="ai.onnx.ml", offset=[0.5] * 4, scale=[2.0] * 4)
    pipeline.graph.node[0].input[0] = "s"
    pipeline.graph.node.insert(0, scaler)
    given = {"loss": LossType.MSELoss, "optimizer": OptimType.SGD, "artifact_directory": tmp_path}
    trained = {}
    for names in (None, ["scaler.scale"]):
        paths = generate_artifacts(pipeline, requires_grad=names, **given)  # type: ignore[arg-type]
        parameters = api.CheckpointState.load_checkpoint(paths["checkpoint"]).parameters
        trained[str(names)] = [p.name for p in parameters.values() if p.requires_grad]
    assert trained == {"None": ["linear.coefficients"], "['scaler.scale']": ["scaler.scale"]}


def test_what_is_not_available_is_said() -> None:
    for attributes, message in (
        ({"post_transform": "PROBIT", **LINEAR, **INTS}, "LinearClassifier with post_transform=PROBIT"),
        ({**LINEAR}, "LinearClassifier with no class labels"),
        ({"coefficients": [1.0] * 11, "intercepts": INTERCEPTS, **INTS}, "11 coefficients in 3 rows"),
        ({"post_transform": "SOFTMAX", **ONE}, "one score and another post_transform"),
    ):
        with pytest.raises(GraphError, match=message):
            gradient_graph(model("LinearClassifier", **attributes), "x", "scores")


@pytest.mark.parametrize("kind", ["LogisticRegression", "Ridge", "SGDClassifier", "MLPClassifier", "forest"])
def test_pipelines_of_scikit_learn_are_trained(tmp_path: Path, kind: str) -> None:
    convert = pytest.importorskip("skl2onnx").to_onnx
    from sklearn import ensemble, linear_model, neural_network
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    estimators = {
        "LogisticRegression": linear_model.LogisticRegression(),
        "Ridge": linear_model.Ridge(),
        "SGDClassifier": linear_model.SGDClassifier(loss="log_loss"),
        "MLPClassifier": neural_network.MLPClassifier((8,), max_iter=5),
        "forest": ensemble.RandomForestRegressor(2),
    }
    labels = np.arange(7) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = make_pipeline(StandardScaler(), estimators[kind]).fit(X, labels)
    options = {id(fitted): {"zipmap": False}} if hasattr(fitted, "classes_") else None
    proto = convert(fitted, X[:1], options=options)
    needs_opset(max(o.version for o in proto.opset_import if not o.domain))
    output = proto.graph.output[-1].name
    given = {"loss": LossType.MSELoss, "loss_input_names": [output], "optimizer": OptimType.AdamW}
    given |= {"additional_output_names": [output], "artifact_directory": tmp_path}
    if kind == "forest":
        with pytest.raises(ArtifactError, match="TreeEnsembleRegressor has its weights in attributes"):
            generate_artifacts(proto, **given)
        return
    paths = generate_artifacts(proto, **given)
    state = api.CheckpointState.load_checkpoint(paths["checkpoint"])
    module = api.Module(paths["training_model"], state, paths["eval_model"])
    optimizer = api.Optimizer(paths["optimizer_model"], module)
    (expected,) = ort.InferenceSession(proto.SerializeToString()).run([output], {"X": X})
    target = np.zeros_like(expected)
    first, found = module.eval()(X, target)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    module.train()
    for _ in range(10):
        module(X, target)
        optimizer.step()
        module.lazy_reset_grad()
    assert module.eval()(X, target)[0] < first
