"""Blocks that write nodes into the ModelProto under construction, as programs for onnxruntime-training do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import digits
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import onnxblock
from onnxtrain.errors import ArtifactError, GraphError
from onnxtrain.onnxblock import _graph_utils, model_accessor
from onnxtrain.onnxblock.blocks import accessor

ROWS = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)


class Halved(onnxblock.Block):
    """Half of a value, written as a node and an initializer."""

    def build(self, name: str) -> str:
        model = accessor._GLOBAL_ACCESSOR.model
        half, out = (_graph_utils.generate_graph_name(token) for token in ("half", "halved"))
        model.graph.initializer.append(numpy_helper.from_array(np.float32([0.5]), half))
        model.graph.node.append(helper.make_node("Mul", [name, half], [out]))
        return out


class Loss(onnxblock.TrainingBlock):
    """Written nodes between blocks of ours; ``held`` was asked for once, before any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.halved, self.mean = Halved(), onnxblock.blocks.ReduceMean(keepdims=False)

    def build(self, name: str) -> str:
        held = self.base.graph
        first = self.halved(name)
        assert [n.output[0] for n in held.node][-1] == first
        square = onnxblock.blocks.Mul()(first, first)
        assert held.node[-1].op_type == "Mul" and list(held.node[-1].output) == [square]
        held.node.append(helper.make_node("Abs", [square], ["whole"]))
        return self.mean(self.op.Add(self.value("whole"), 1.0).name)


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def scores() -> np.ndarray:
    return run(forward(), {"image": ROWS})[0]


def forward() -> onnx.ModelProto:
    """The network without dropout."""
    model = digits.network()
    nodes = [n for n in model.graph.node if n.op_type in ("Gemm", "Relu")]
    nodes[-1].input[0] = nodes[1].output[0]
    kept = copy.deepcopy(nodes)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def test_written_nodes_are_trained_through() -> None:
    block = Loss()
    with onnxblock.base(forward()):
        block("scores")
    block.requires_grad("second_*")
    training, evaluation = block.to_model_proto()
    trainable, frozen = block.parameters()
    assert [t.name for t in trainable] == ["second_weight", "second_bias"]
    weights = {t.name: numpy_helper.to_array(t) for t in [*trainable, *frozen]}
    assert set(weights) >= {"first_weight", "first_bias"}
    expected = np.mean((scores() / 2) ** 2) + 1
    (loss,) = run(evaluation, {"image": ROWS} | weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    buffers = {f"{t.name}_grad.accumulation.buffer": np.zeros_like(weights[t.name]) for t in trainable}
    values = run(training, {"image": ROWS, "lazy_reset_grad": np.array(True)} | weights | buffers)
    names = [o.name for o in training.graph.output]
    gradient = values[names.index("second_bias_grad.accumulation.out")]
    np.testing.assert_allclose(gradient, scores().sum(0) / 2 / scores().size, rtol=1e-5)


def test_what_is_removed_and_rewired_there_is_so_in_the_model() -> None:
    with onnxblock.base(digits.network()) as made:
        graph = made.model.graph
        drop = next(n for n in graph.node if n.op_type == "Dropout")
        last = graph.node[-1]
        last.input[0] = drop.input[0]
        graph.node.remove(drop)
        next(i for i in graph.initializer if i.name == "second_bias").CopyFrom(
            numpy_helper.from_array(np.ones(10, np.float32), "second_bias")
        )
        block = Passing()
        block("scores")
    model = block.to_model_proto()
    assert "Dropout" not in [n.op_type for n in model.graph.node]
    bias = next(i for i in model.graph.initializer if i.name == "second_bias")
    assert numpy_helper.to_array(bias).all()


class Passing(onnxblock.ForwardBlock):
    def build(self, name: str) -> str:
        return onnxblock.blocks.PassThrough()(name)


def test_a_model_from_nothing_is_written() -> None:
    with onnxblock.empty_base() as made:
        made.model.graph.input.append(helper.make_tensor_value_info("text", TensorProto.STRING, [1, 4]))
        made.model.opset_import.append(helper.make_opsetid("", 14))  # it has one: nodes are in that one's form
        block = Numbers()
        block("text")
    model = block.to_model_proto()
    assert [(i.domain, i.version) for i in model.opset_import] == [("", 20)]
    (found,) = run(model, {"text": np.array([["1", "2", "3", "4"]], dtype=object)})
    assert found.shape == (1, 2)


class Numbers(onnxblock.ForwardBlock):
    def build(self, name: str) -> str:
        return onnxblock.blocks.Linear(4, 2)(onnxblock.blocks.Cast(to=TensorProto.FLOAT)(name))


def test_the_accessor_is_what_is_open() -> None:
    assert model_accessor._GLOBAL_ACCESSOR is None and accessor is model_accessor
    with onnxblock.base(forward()) as made:
        assert model_accessor._GLOBAL_ACCESSOR is made and isinstance(made, model_accessor.ModelAccessor)
        assert not made.has_path and made.model is made.model
        assert {i.name for i in made.graph.initializer} == {
            "first_weight",
            "first_bias",
            "second_weight",
            "second_bias",
        }
        with pytest.raises(ArtifactError, match="was not read from a file"):
            _ = made.path
        with onnxblock.empty_base() as inner:
            assert model_accessor._GLOBAL_ACCESSOR is inner
    assert model_accessor._GLOBAL_ACCESSOR is None
    with pytest.raises(AttributeError, match="other"):
        _ = model_accessor.other


def test_the_file_of_a_model_is_known(tmp_path: Path) -> None:
    onnx.save(forward(), tmp_path / "model.onnx")
    with onnxblock.base(tmp_path / "model.onnx") as made:
        assert made.path == str(tmp_path / "model.onnx")
    with onnxblock.base(forward(), str(tmp_path / "model.onnx")) as made:
        assert made.has_path


def test_what_is_no_graph_is_an_error_of_ours() -> None:
    with onnxblock.base(forward()) as made:
        made.graph.node.append(helper.make_node("Relu", ["nowhere"], ["y"]))
        with pytest.raises(GraphError, match="nowhere"):
            onnxblock.blocks.Abs()("y")


def test_an_optimizer_takes_what_parameters_gives() -> None:
    block = Loss()
    block.requires_grad("second_bias")
    with onnxblock.base(forward()):
        block("scores")
    optimizer = onnxblock.optim.SGD()
    with onnxblock.empty_base() as made:
        optimizer(block.parameters())
        written = made.model
    model = optimizer.to_model_proto()  # after the model is closed
    assert (
        [o.name for o in model.graph.output]
        == [o.name for o in written.graph.output]
        == ["step.out", "second_bias.out"]
    )


def test_who_asks_for_the_gradient_of_an_input_is_told_of_gradient_graph() -> None:
    block = Loss()
    block.requires_grad("image")
    with onnxblock.base(forward()), pytest.raises(ArtifactError, match=r"gradient_graph\(model, wrt=name\)"):
        block("scores")
        block.parameters()
    with onnxblock.base(forward()) as made, pytest.raises(ArtifactError, match="no floating initializer other"):
        made.weight("other")


def test_labels_are_encoded_by_onnx_names() -> None:
    with onnxblock.base(forward()) as made:
        made.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]))
        block = Encoded()
        block("labels")
    model = block.to_model_proto()
    (found,) = run(model, {"image": ROWS, "labels": np.array([1, 2, 5])})
    assert found.tolist() == [521, 522, 7]
    with pytest.raises(ArtifactError, match="no attribute keys_ints"):
        onnxblock.blocks.LabelEncoder(keys_ints=[1], values_int64s=[2])


class Encoded(onnxblock.ForwardBlock):
    def build(self, name: str) -> str:
        encoder = onnxblock.blocks.LabelEncoder(default_int64=7, keys_int64s=[1, 2], values_int64s=[521, 522])
        return encoder(name)


class OfEncoded(onnxblock.ForwardBlock):
    """Labels that are made of others."""

    def build(self, scores: str) -> str:
        labels = copy.deepcopy(self.base.graph.output[0])
        labels.name, labels.type.tensor_type.elem_type = "kinds", TensorProto.INT64
        del labels.type.tensor_type.shape.dim[1]
        self.base.graph.input.append(labels)
        encoder = onnxblock.blocks.LabelEncoder(default_int64=0, keys_int64s=[521, 522], values_int64s=[1, 2])
        return onnxblock.loss.CrossEntropyLoss()(scores, encoder("kinds"))


def test_a_target_may_be_a_value_that_nodes_make() -> None:
    with onnxblock.base(forward()):
        block = OfEncoded()
        block("scores")
    model = block.to_model_proto()
    assert [i.name for i in model.graph.input] == ["image", "kinds"]
    (loss,) = run(model, {"image": ROWS, "kinds": np.array([521, 522, 7, 521, 521])})
    exact = scores() - np.log(np.exp(scores()).sum(1, keepdims=True))
    np.testing.assert_allclose(loss, -exact[np.arange(5), [1, 2, 0, 1, 1]].mean(), rtol=1e-5)
    with onnxblock.base(forward()), pytest.raises(ArtifactError, match="first_bias, which is no input"):
        onnxblock.loss.MSELoss()("scores", "first_bias")


def test_look_ups_in_a_model() -> None:
    model = onnx.shape_inference.infer_shapes(forward())
    assert _graph_utils.get_input_from_input_name(model, "image").name == "image"
    assert _graph_utils.get_output_from_output_name(model, "scores").name == "scores"
    assert _graph_utils.node_arg_exists(model, "hidden") and not _graph_utils.node_arg_exists(model, "other")
    _graph_utils.register_graph_outputs(model, ["hidden", "scores"])
    assert [o.name for o in model.graph.output] == ["hidden", "scores"]
    with pytest.raises(ArtifactError, match="no output other"):
        _graph_utils.get_output_from_output_name(model, "other")
