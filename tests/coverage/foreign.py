"""Models of other libraries, each with a twin in torch that has the same weights: Keras, scikit-learn, onnx.helper.

The twin is what the file is compared with; what of the file is trained is found by content, as for torch's exporters.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from specimens import CLASSES, VOCABULARY, Specimen
from torch import nn

Write = Callable[[int | None, Path], None]


class Perceptron(nn.Module):
    """What scikit-learn's has: linear layers."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, outputs))

    def forward(self, x):
        return self.layers(x)


class Images(nn.Module):
    """Channels are last in Keras; one convolution is followed by BatchNormalization, one is depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3)
        self.depthwise, self.head = nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, CLASSES)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x.permute(0, 3, 1, 2))))
        return self.head(self.depthwise(y).mean((2, 3)))


class Tokens(nn.Module):
    """An embedding, normalized, an LSTM over it, and the classes of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 12), nn.LayerNorm(12, eps=1e-3)
        self.lstm, self.head = nn.LSTM(12, 16, bias=False, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(self.norm(self.embedding(x)))[0][:, -1])


def _rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 6)}


def _pictures() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 9, 9, 3)}


def _ids() -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, VOCABULARY, (2, 7), dtype=torch.int32)}


FOREIGN = [
    Specimen("Keras perceptron", "keras", Perceptron, _rows),
    Specimen("Keras convolutions", "keras", Images, _pictures),
    Specimen("Keras LSTM", "keras", Tokens, _ids),
    Specimen("MLPClassifier", "skl2onnx", Perceptron, _rows),
    Specimen("MLPRegressor", "skl2onnx", functools.partial(Perceptron, 1), _rows),
    Specimen("perceptron by onnx.helper", "onnx", Perceptron, _rows),
    Specimen("convolutions by onnx.helper", "onnx", Images, _pictures),
    Specimen("LSTM by onnx.helper", "onnx", Tokens, _ids),
]


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def keras_model(specimen: Specimen, module: Any) -> Write:
    """Keras' own export, which calls tf2onnx."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    keras = importlib.import_module("keras")
    given = specimen.batch()["x"].numpy()
    layers = keras.layers
    if isinstance(module, Perceptron):
        body = [layers.Dense(16, "relu"), layers.Dense(8, "relu"), layers.Dense(CLASSES)]
        weights = [[_array(p.weight).T, _array(p.bias)] for p in module.layers if isinstance(p, nn.Linear)]
    elif isinstance(module, Images):
        kinds = [layers.BatchNormalization(), layers.ReLU(), layers.DepthwiseConv2D(3), layers.GlobalAveragePooling2D()]
        body = [layers.Conv2D(8, 3), *kinds, layers.Dense(CLASSES)]
        norm, deep = module.norm, module.depthwise
        weights = [
            [_array(module.conv.weight).transpose(2, 3, 1, 0), _array(module.conv.bias)],
            [_array(t) for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)],
            [],
            [_array(deep.weight).transpose(2, 3, 0, 1), _array(deep.bias)],
            [],
            [_array(module.head.weight).T, _array(module.head.bias)],
        ]
    else:
        body = [layers.Embedding(VOCABULARY, 12), layers.LayerNormalization(), layers.LSTM(16, use_bias=False)]
        body = [*body, layers.Dense(CLASSES)]
        weights = [
            [_array(module.embedding.weight)],
            [_array(module.norm.weight), _array(module.norm.bias)],
            [_array(module.lstm.weight_ih_l0).T, _array(module.lstm.weight_hh_l0).T],
            [_array(module.head.weight).T, _array(module.head.bias)],
        ]
    model = keras.Sequential([keras.Input(given.shape[1:], dtype=given.dtype.name, name="x"), *body])
    model(given)
    for layer, content in zip(body, weights, strict=True):
        layer.set_weights(content)

    def write(opset: int | None, path: Path) -> None:
        settings = {} if opset is None else {"opset_version": opset}
        model.export(path, format="onnx", verbose=False, **settings)

    return write


def scikit_learn(specimen: Specimen, module: Any) -> Write:
    """A perceptron fitted for one step, then given the twin's weights, by skl2onnx."""
    import skl2onnx
    from sklearn import neural_network

    x = np.concatenate([specimen.batch()["x"].numpy() for _ in range(10)])
    labels = np.arange(20) % CLASSES
    classifies = specimen.name == "MLPClassifier"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = neural_network.MLPClassifier if classifies else neural_network.MLPRegressor
        fitted = kind(hidden_layer_sizes=(16, 8), max_iter=1).fit(x, labels)
    linear = [p for p in module.layers if isinstance(p, nn.Linear)]
    fitted.coefs_, fitted.intercepts_ = [_array(p.weight).T for p in linear], [_array(p.bias) for p in linear]

    def write(opset: int | None, path: Path) -> None:
        options = {"zipmap": False} if classifies else None
        made = skl2onnx.to_onnx(fitted, x[:1], options=options, target_opset=opset)
        made.graph.input[0].name, old = "x", made.graph.input[0].name
        for node in made.graph.node:
            node.input[:] = ["x" if name == old else name for name in node.input]
        scores = next((n.input[0] for n in made.graph.node if n.op_type == "Softmax"), None)
        if scores is not None:  # the loss reads what Softmax reads
            made.graph.output.insert(0, helper.make_tensor_value_info(scores, TensorProto.FLOAT, [None, CLASSES]))
        onnx.save(made, path)

    return write


def by_helper(specimen: Specimen, module: Any) -> Write:
    """A graph written node by node, at any opset; its axes have names that are no identifiers, or none."""
    dims: dict[type, list[Any]] = {Perceptron: [None, 6], Images: ["output-0_dim0", 9, 9, 3], Tokens: ["N", "T+?"]}

    def write(opset: int | None, path: Path) -> None:
        version = opset or onnx.defs.onnx_opset_version()
        nodes, weights = {Perceptron: _perceptron, Images: _images, Tokens: _tokens}[type(module)](module, version)
        kind = TensorProto.INT32 if isinstance(module, Tokens) else TensorProto.FLOAT
        first = helper.make_tensor_value_info("x", kind, dims[type(module)])
        last = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [dims[type(module)][0], CLASSES])
        held = [onnx.numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in weights.items()]
        made = helper.make_model(
            helper.make_graph(nodes, "graph", [first], [last], held), opset_imports=[helper.make_opsetid("", version)]
        )
        made.ir_version = helper.find_min_ir_version_for(made.opset_import)
        onnx.checker.check_model(made)
        onnx.save(made, path)

    return write


def _perceptron(module: Perceptron, version: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    linear = [p for p in module.layers if isinstance(p, nn.Linear)]
    nodes, weights, last = [], {}, "x"
    for i, part in enumerate(linear):
        weights |= {f"val_{2 * i}": _array(part.weight), f"val_{2 * i + 1}": _array(part.bias)}
        out = "scores" if i == len(linear) - 1 else f"y{i}"
        nodes.append(helper.make_node("Gemm", [last, f"val_{2 * i}", f"val_{2 * i + 1}"], [out], transB=1))
        if out != "scores":
            nodes.append(helper.make_node("Relu", [out], [f"{out}.1"]))
        last = f"{out}.1"
    return nodes, weights


def _images(module: Images, version: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    norm, deep = module.norm, module.depthwise
    weights = {
        "conv.w": _array(module.conv.weight), "conv.b": _array(module.conv.bias), "gamma": _array(norm.weight),
        "beta": _array(norm.bias), "mean": _array(norm.running_mean), "var": _array(norm.running_var),
        "deep.w": _array(deep.weight), "deep.b": _array(deep.bias), "head.w": _array(module.head.weight).T,
        "head.b": _array(module.head.bias),
    }  # fmt: skip
    axes = {} if version >= 18 else {"axes": [2, 3]}
    if version >= 18:
        weights["axes"] = np.array([2, 3])
    nodes = [
        helper.make_node("Transpose", ["x"], ["y0"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["y0", "conv.w", "conv.b"], ["y1"]),
        helper.make_node("BatchNormalization", ["y1", "gamma", "beta", "mean", "var"], ["y2"], epsilon=1e-3),
        helper.make_node("Relu", ["y2"], ["y3"]),
        helper.make_node("Conv", ["y3", "deep.w", "deep.b"], ["y4"], group=8),
        helper.make_node("ReduceMean", ["y4", "axes"] if version >= 18 else ["y4"], ["y5"], keepdims=0, **axes),
        helper.make_node("MatMul", ["y5", "head.w"], ["y6"]),
        helper.make_node("Add", ["y6", "head.b"], ["scores"]),
    ]
    return nodes, weights


def _tokens(module: Tokens, version: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    gates = [0, 3, 1, 2]  # input, output, forget, cell in ONNX; input, forget, cell, output in torch
    order = np.concatenate([np.arange(16) + 16 * g for g in gates])
    weights = {
        "table": _array(module.embedding.weight), "gamma": _array(module.norm.weight), "beta": _array(module.norm.bias),
        "W": _array(module.lstm.weight_ih_l0)[order][None], "R": _array(module.lstm.weight_hh_l0)[order][None],
        "head.w": _array(module.head.weight), "head.b": _array(module.head.bias), "first": np.array([0]),
        "eps": np.float32([1e-3]), "two": np.float32(2),
    }  # fmt: skip
    nodes = [helper.make_node("Gather", ["table", "x"], ["e"])]
    if version >= 17:
        nodes.append(helper.make_node("LayerNormalization", ["e", "gamma", "beta"], ["n"], epsilon=1e-3))
        del weights["eps"], weights["two"]
    else:
        nodes += _normalized()
    nodes += [
        helper.make_node("Transpose", ["n"], ["t"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["t", "W", "R"], ["", "last"], hidden_size=16),
        helper.make_node("Squeeze", ["last", "first"], ["s"]),
        helper.make_node("Gemm", ["s", "head.w", "head.b"], ["scores"], transB=1),
    ]
    return nodes, weights


def _normalized() -> list[Any]:
    """LayerNormalization in simpler operators, for opsets that have none."""
    return [
        helper.make_node("ReduceMean", ["e"], ["m"], axes=[-1]),
        helper.make_node("Sub", ["e", "m"], ["c"]),
        helper.make_node("Pow", ["c", "two"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["v"], axes=[-1]),
        helper.make_node("Add", ["v", "eps"], ["ve"]),
        helper.make_node("Sqrt", ["ve"], ["d"]),
        helper.make_node("Div", ["c", "d"], ["u"]),
        helper.make_node("Mul", ["u", "gamma"], ["g"]),
        helper.make_node("Add", ["g", "beta"], ["n"]),
    ]
