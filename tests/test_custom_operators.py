"""Operators of a library of the user's: carried through to the session that loads it, wherever no gradient goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import gradient_graph
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ArtifactError, GradientError, GraphError

RNG = np.random.default_rng(0)
WEIGHTS = {"frozen": RNG.normal(size=(4, 6)).astype(np.float32), "head": RNG.normal(size=(6, 3)).astype(np.float32)}


def value(name: str, *dims: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def model(nodes: list[onnx.NodeProto], *infos: onnx.ValueInfoProto, inputs: Any = None) -> onnx.ModelProto:
    """A network behind whatever makes ``a`` of shape (batch, 4)."""
    rest = [
        helper.make_node("MatMul", ["a", "frozen"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "head"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(v, n) for n, v in WEIGHTS.items()]
    first = [inputs or value("x", "batch", 4)]
    graph = helper.make_graph([*nodes, *rest], "g", first, [value("y", "batch", 3)], tensors, value_info=infos)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("custom", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


PREPARE = [helper.make_node("Normalize", ["x"], ["a"], domain="custom", strength=2.0)]
GIVEN = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.SGD}


def with_body(proto: onnx.ModelProto) -> bytes:
    """The model with a body for the operator, ``x / 2``: what the library would compute."""
    nodes = [
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array(2, np.float32))),
        helper.make_node("Div", ["x", "two"], ["a"]),
    ]
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    opsets = [helper.make_opsetid("", 20)]
    made.functions.append(helper.make_function("custom", "Normalize", ["x"], ["a"], nodes, opsets, ["strength"]))
    return made.SerializeToString()


def test_preprocessing_in_front_of_what_is_trained(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"not loaded here")
    files = generate_artifacts(
        model(PREPARE, value("a", "batch", 4)), custom_op_library=library, artifact_directory=tmp_path, **GIVEN
    )
    for kind in ("training_model", "eval_model"):
        proto = onnx.load(files[kind])
        onnx.checker.check_model(proto)
        (node,) = (n for n in proto.graph.node if n.domain == "custom")
        assert node.op_type == "Normalize" and node.attribute[0].f == 2.0
        assert {o.domain: o.version for o in proto.opset_import}["custom"] == 1
    proto = onnx.load(files["training_model"])
    session = ort.InferenceSession(with_body(proto), providers=["CPUExecutionProvider"])
    x, labels = RNG.normal(size=(8, 4)).astype(np.float32), RNG.integers(0, 3, 8)
    feeds = {"x": x, "labels": labels, "lazy_reset_grad": np.array(True), **WEIGHTS}
    feeds |= {f"{n}_grad.accumulation.buffer": np.zeros_like(v) for n, v in WEIGHTS.items()}
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in WEIGHTS.items()}
    scores = (torch.tensor(x) / 2 @ leaves["frozen"]).relu() @ leaves["head"]
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(found[f"{name}_grad.accumulation.out"], leaf.grad, rtol=1e-4, atol=1e-6)


def test_shapes_of_what_it_makes_are_those_of_the_file(tmp_path: Path) -> None:
    """Behind a tokenizer, say, of a string: what is written in ``value_info`` is taken."""
    text = helper.make_tensor_value_info("x", TensorProto.STRING, ["batch"])
    nodes = [
        helper.make_node("Tokenize", ["x"], ["ids", "weight"], domain="custom"),
        helper.make_node("Cast", ["ids"], ["f"], to=int(TensorProto.FLOAT)),
        helper.make_node("Mul", ["f", "weight"], ["a"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 4])
    given = model(nodes, ids, value("weight", "batch", 4), inputs=text)
    files = generate_artifacts(given, artifact_directory=tmp_path, **GIVEN)
    proto = onnx.load(files["training_model"])
    assert [i.type.tensor_type.elem_type for i in proto.graph.input][:1] == [TensorProto.STRING]
    assert [n.op_type for n in proto.graph.node if n.domain == "custom"] == ["Tokenize"]


def test_a_shape_that_is_not_known_is_an_error_that_names_the_value(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="the element type of a is not known") as caught:
        generate_artifacts(model(PREPARE), artifact_directory=tmp_path, **GIVEN)
    assert "custom::Normalize" in caught.value.node and "value_info" in caught.value.cure


def test_between_what_is_trained_and_the_loss_it_is_an_error(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "shift"], ["s"]),
        helper.make_node("Normalize", ["s"], ["a"], domain="custom"),
    ]
    given = model(nodes, value("a", "batch", 4))
    given.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "shift"))
    with pytest.raises(GradientError, match="no gradient rule for the operator custom::Normalize"):
        generate_artifacts(given, artifact_directory=tmp_path, **GIVEN)
    files = generate_artifacts(given, ["head"], artifact_directory=tmp_path, **GIVEN)
    assert "custom" in {n.domain for n in onnx.load(files["training_model"]).graph.node}
    with pytest.raises(GradientError, match="custom::Normalize"):
        gradient_graph(given, "x")
    assert [o.name for o in gradient_graph(given, "head").graph.output] == ["y", "head_grad"]


def test_a_library_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"missing\.so cannot be read"):
        generate_artifacts(
            model(PREPARE, value("a", "batch", 4)),
            custom_op_library=tmp_path / "missing.so",
            artifact_directory=tmp_path,
            **GIVEN,
        )
