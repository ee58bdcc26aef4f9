"""What constants are taken for: weights, tables that somebody computed, settings, and what may be either."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import artifacts
from onnxtrain.ir import forms
from onnxtrain.ir.forms import Form
from onnxtrain.ir.reading import decisions
from onnxtrain.ir.weights import Kind, is_generated

RNG = np.random.default_rng(0)
POSITIONS = np.arange(12)[:, None] / 100 ** (np.arange(6) / 6)
STEPS = np.arange(10)

TABLES = {
    "cosines": (np.cos(POSITIONS), Form.REGULAR),
    "both of a rotary embedding": (np.concatenate([np.sin(POSITIONS)] * 2, 1)[None, None], Form.REGULAR),
    "frequencies": (1 / 10000 ** (np.arange(8) / 8), Form.REGULAR),
    "two frequencies": (1 / 10000 ** (np.arange(2) / 2), Form.REGULAR),
    "short steps": (np.array([1.0, 2.0]), Form.IRREGULAR),
    "slopes": ((2.0 ** -np.arange(1, 9))[:, None, None], Form.REGULAR),
    "distances": (-np.abs(STEPS[:, None] - STEPS)[None] * 0.5, Form.REGULAR),
    "identity": (np.eye(6), Form.MASK),
    "causal": (np.triu(np.full((5, 5), -np.inf), 1), Form.MASK),
    "windows": (np.where(RNG.random((4, 9, 9)) < 0.5, -100.0, 0.0), Form.MASK),
    "ones": (np.ones((3, 4)), Form.SAME),
    "blur": (np.tile(np.outer([1, 2, 1], [1, 2, 1]) / 16, (8, 1, 1, 1)), Form.REPEATED),
    "filters": (np.where(RNG.random((40, 20)) < 0.05, RNG.random((40, 20)), 0), Form.SPARSE),
    "repeated vector": (np.tile(RNG.normal(size=(1, 1, 6)), (5, 1, 1)), Form.REPEATED),
    "matrix": (RNG.normal(size=(16, 8)), Form.IRREGULAR),
    "vector": (RNG.normal(size=6), Form.IRREGULAR),
    "short vector": (RNG.normal(size=3), Form.IRREGULAR),
    "uniform": (RNG.uniform(-0.1, 0.1, (4, 3, 3, 3)), Form.IRREGULAR),
}


@pytest.mark.parametrize(("array", "expected"), TABLES.values(), ids=TABLES)
def test_forms(array: np.ndarray, expected: Form) -> None:
    assert forms.of(array.astype(np.float32)) is expected


def test_random_weights_follow_no_rule() -> None:
    shapes = [(5,), (7,), (4, 4), (6, 5), (8, 1, 1), (1, 16, 1), (3, 3, 3, 3), (2, 64)]
    for index in range(400):
        array = np.random.default_rng(index).normal(size=shapes[index % len(shapes)]).astype(np.float32)
        assert forms.of(array) is Form.IRREGULAR, (index, array)


def test_names_that_exporters_make_up() -> None:
    made = ("val_12", "onnx::MatMul_190", "/layers.0/Constant_1_output_0", "unsqueeze_4", "_to_copy_2", "B0__32")
    assert all(map(is_generated, made))
    assert not any(map(is_generated, ("layers.0.norm.weight", "bias", "w1", "h.0.ln_1.bias", "dense/kernel:0")))


def decided(*nodes: onnx.NodeProto, **constants: np.ndarray) -> dict[str, Kind]:
    """What the constants of a graph of these nodes are; ``x`` is its input, ``y`` its output."""
    held = [numpy_helper.from_array(a.astype(np.float32), n.replace("__", ".")) for n, a in constants.items()]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return {d.name: d.kind for d in decisions(model)}


def node(op_type: str, *inputs: str, out: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op_type, list(inputs), [out], **attributes)


def test_use_decides_before_form() -> None:
    ones, zeros, matrix = np.ones(4), np.zeros(4), RNG.normal(size=(4, 4))
    product = node("MatMul", "x", "w", out="p")
    assert decided(product, node("Add", "p", "b"), w=matrix, b=zeros) == {"w": Kind.WEIGHT, "b": Kind.WEIGHT}
    assert decided(product, node("Add", "p", "b"), w=matrix, b=zeros[None]) == {"w": Kind.WEIGHT, "b": Kind.DOUBTFUL}
    assert decided(node("LayerNormalization", "x", "s", "b"), s=ones, b=zeros) == dict.fromkeys("sb", Kind.WEIGHT)
    found = decided(node("InstanceNormalization", "x", "val_1", "n.bias"), val_1=ones, n__bias=zeros)
    assert found == {"val_1": Kind.DOUBTFUL, "n.bias": Kind.WEIGHT}
    found = decided(node("BatchNormalization", "x", "s", "b", "m", "v"), s=ones, b=zeros, m=zeros, v=ones)
    assert [*found.values()] == [Kind.WEIGHT, Kind.WEIGHT, Kind.STATISTIC, Kind.STATISTIC]
    states = {"w": RNG.normal(size=(1, 16, 4)), "r": RNG.normal(size=(1, 16, 4)), "h": np.zeros((1, 2, 4))}
    found = decided(
        node("Expand", "h", "n", out="first"),
        node("LSTM", "x", "w", "r", "", "", "first", "first", hidden_size=4, out="y"),
        **states,
    )
    assert found == {"w": Kind.WEIGHT, "r": Kind.WEIGHT, "h": Kind.CONSTANT}
    assert decided(node("Clip", "x", "low"), low=np.array(0.5)) == {"low": Kind.CONSTANT}


def test_form_decides_where_use_does_not() -> None:
    cosines, learned = TABLES["cosines"][0], RNG.normal(size=(12, 6))
    assert decided(node("Mul", "x", "c"), c=cosines) == {"c": Kind.CONSTANT}
    assert decided(node("Add", "x", "c"), c=learned) == {"c": Kind.WEIGHT}
    assert decided(node("Add", "x", "c"), c=TABLES["causal"][0]) == {"c": Kind.CONSTANT}
    assert decided(node("MatMul", "x", "c"), c=TABLES["frequencies"][0][None]) == {"c": Kind.CONSTANT}
    assert decided(node("Div", "x", "std"), std=RNG.random((3, 1, 1))) == {"std": Kind.DOUBTFUL}
    assert decided(node("Add", "x", "eps"), eps=np.array([1e-5])) == {"eps": Kind.DOUBTFUL}
    product = node("MatMul", "x", "w", out="p")
    assert decided(product, node("Add", "p", "b"), w=learned, b=np.array([0.3]))["b"] is Kind.WEIGHT
    turned = (node("Transpose", "w", out="t"), node("MatMul", "x", "t"))
    assert decided(*turned, w=learned) == {"w": Kind.WEIGHT}


def test_constant_nodes_are_weights_as_initializers_are() -> None:
    def made(name: str) -> onnx.NodeProto:
        content = numpy_helper.from_array(RNG.normal(size=(4, 4)).astype(np.float32))
        return helper.make_node("Constant", [], [name], value=content)

    eps = helper.make_node("Constant", [], ["/norm/Constant_output_0"], value_float=1e-5)
    nodes = [made("w"), node("MatMul", "x", "w", out="p"), eps, node("Add", "p", "/norm/Constant_output_0", out="q")]
    nodes += [made("/Constant_1_output_0"), node("MatMul", "q", "/Constant_1_output_0")]
    found = decided(*nodes)
    # TorchScript's exporter has initializers for all parameters
    assert found == {
        "w": Kind.WEIGHT,
        "/norm/Constant_output_0": Kind.CONSTANT,
        "/Constant_1_output_0": Kind.DOUBTFUL,
    }


def test_the_table_prints_with_reasons() -> None:
    graph = helper.make_graph(
        [node("MatMul", "x", "w", out="h"), node("Mul", "h", "table")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(RNG.normal(size=(6, 12)).astype(np.float32), "w"),
            numpy_helper.from_array(np.cos(np.arange(12)).astype(np.float32).reshape(1, 12), "table"),
        ],
    )
    found = artifacts.weights(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    first, second = str(found).splitlines()
    assert first.split() == ["w", "float", "[6,", "12]", "weight", "factor", "of", "a", "product"]
    assert second.split()[:4] == ["table", "float", "[1,", "12]"] and "follow a rule" in second
