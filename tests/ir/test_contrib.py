"""What onnxruntime's optimizers put into a model is written out again: the same numbers, and it trains."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from releases import needs_release

from onnxtrain import Options
from onnxtrain.compiler import Report, compile_graph
from onnxtrain.errors import GraphError
from onnxtrain.ir.expansions import is_fused
from onnxtrain.ir.reading import read_forward
from onnxtrain.ir.standard_form import attach

RNG = np.random.default_rng(1)


@dataclasses.dataclass(frozen=True)
class Fused:
    """One node: inputs (None: missing), how many outputs, which of them are looked at, and attributes."""

    op: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    domain: str = "com.microsoft"
    kernel: bool = True
    since: str = ""  # the release whose kernel takes it


def r(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def i(*content: Any) -> np.ndarray:
    return np.array(content, np.int32)


X, HIDDEN = r(2, 5, 8), r(2, 3, 8)
MASK = i([1, 1, 1, 1, 0], [1, 1, 0, 0, 0])
WORDS = (i([1, 2, 3], [4, 0, 1]), i([0, 0, 1], [0, 1, 1]), r(6, 8), r(4, 8), r(2, 8), r(8), r(8))
PLACES = np.array([[0, 2, 4, 6, 8], [1, 2, 3, 4, 5]])
PROJECT = (X, r(8, 24), r(24))
ROWS = {
    "Gelu": Fused("Gelu", (X,)),
    "BiasGelu": Fused("BiasGelu", (X, r(8))),
    "FastGelu": Fused("FastGelu", (X,)),
    "FastGelu-bias": Fused("FastGelu", (X, r(8))),
    "QuickGelu": Fused("QuickGelu", (X,)),
    "QuickGelu-alpha": Fused("QuickGelu", (X,), {"alpha": 1.0}),
    "FusedMatMul": Fused("FusedMatMul", (r(2, 4, 3), r(2, 5, 4)), {"transA": 1, "transB": 1, "alpha": 0.5}),
    "FusedMatMul-batch": Fused(
        "FusedMatMul", (r(3, 2, 4), r(5, 2, 4)),
        {"transBatchA": 1, "transBatchB": 1, "transB": 1},
    ),
    "TransposeMatMul": Fused("TransposeMatMul", (r(4, 3), r(4, 5)), {"transA": 1}),
    "FusedGemm": Fused(
        "FusedGemm", (r(3, 4), r(5, 4), r(5)),
        {"transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.3},
    ),
    "FusedConv": Fused("FusedConv", (r(1, 2, 5, 5), r(3, 2, 3, 3), r(3)), {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    "FusedConv-sum": Fused(
        "FusedConv", (r(1, 2, 4, 4), r(3, 2, 1, 1), r(3), r(1, 3, 4, 4)),
        {"activation": "Clip", "activation_params": [-0.5, 0.5]},
    ),
    "SkipLayerNormalization": Fused(
        "SkipLayerNormalization", (X, r(2, 5, 8), r(8), r(8), r(8)),
        {"epsilon": 1e-5}, ("y", "", "", "s"),
    ),
    "SkipLayerNormalization-broadcast": Fused("SkipLayerNormalization", (X, r(1, 5, 8), r(8))),
    "SkipSimplifiedLayerNormalization": Fused(
        "SkipSimplifiedLayerNormalization", (X, r(2, 5, 8), r(8)),
        {"epsilon": 1e-6}, ("y", "", "", "s"),
    ),
    "SimplifiedLayerNormalization": Fused("SimplifiedLayerNormalization", (X, r(8)), {"epsilon": 1e-6}, domain=""),
    "EmbedLayerNormalization": Fused("EmbedLayerNormalization", (*WORDS, i([1, 1, 0], [1, 1, 1])), {}, ("y", "m")),
    "EmbedLayerNormalization-plain": Fused(
        "EmbedLayerNormalization", (WORDS[0], None, *WORDS[2:4], None, *WORDS[5:]),
        {}, ("y", "m"),
    ),
    "Attention": Fused("Attention", PROJECT, {"num_heads": 2}),
    "Attention-mask": Fused("Attention", (*PROJECT, MASK), {"num_heads": 2}),
    "Attention-lengths": Fused("Attention", (*PROJECT, i(4, 2)), {"num_heads": 2}),
    "Attention-causal": Fused("Attention", (*PROJECT, MASK), {"num_heads": 2, "unidirectional": 1, "scale": 0.3}),
    "Attention-past": Fused(
        "Attention", (*PROJECT, None, r(2, 2, 2, 3, 4)),
        {"num_heads": 2, "unidirectional": 1}, ("y", "p"),
    ),
    "Attention-sizes": Fused("Attention", (X, r(8, 28), r(28)), {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]}),
    "MultiHeadAttention": Fused("MultiHeadAttention", (X, HIDDEN, HIDDEN, r(24)), {"num_heads": 2}),
    "MultiHeadAttention-mask": Fused("MultiHeadAttention", (X, X, X, None, MASK, r(1, 2, 5, 5)), {"num_heads": 2}),
    "MultiHeadAttention-past": Fused(
        "MultiHeadAttention", (X, X, X, None, None, None, r(2, 2, 3, 4), r(2, 2, 3, 4)),
        {"num_heads": 2}, ("y", "k", "v"),
    ),
    "RotaryEmbedding": Fused("RotaryEmbedding", (X, PLACES, r(9, 2), r(9, 2))),
    "RotaryEmbedding-offset": Fused("RotaryEmbedding", (X, np.array([3]), r(9, 2), r(9, 2)), {"interleaved": 1}),
    "RotaryEmbedding-heads": Fused("RotaryEmbedding", (r(2, 3, 5, 4), PLACES, r(9, 2), r(9, 2))),
    "SwiGLU": Fused("SwiGLU", (X, r(2, 5, 8)), {"activation_alpha": 0.7}, kernel=False),
    "SwiGLU-bounded": Fused(
        "SwiGLU", (r(2, 5, 16),),
        {"activation_alpha": 1.702, "activation_beta": 1.0, "limit": 0.5}, kernel=False,
    ),
    "LinearAttention": Fused(
        "LinearAttention", (r(2, 5, 16), X, r(2, 5, 6), r(2, 2, 4, 3), -abs(r(2, 5, 8)), r(2, 5, 2)),
        {"q_num_heads": 4, "kv_num_heads": 2}, ("y", "s"), since="1.32",
    ),
    "LinearAttention-linear": Fused(
        "LinearAttention", (X, X, X),
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear", "scale": 0.3}, ("y", "s"), since="1.32",
    ),
    "CausalConvWithState": Fused(
        "CausalConvWithState", (X, r(5, 1, 3), r(5), r(2, 5, 2)),
        {"activation": "silu"}, ("y", "s"), since="1.32",
    ),
    "CausalConvWithState-dilated": Fused(
        "CausalConvWithState", (X, r(5, 1, 3)),
        {"dilation": 2}, ("y", "s"), since="1.32",
    ),
    "Trilu": Fused("Trilu", (r(4, 4),), {"upper": 0}),
    "BiasDropout": Fused("BiasDropout", (X, r(8), X), kernel=False),
    "BiasSoftmax": Fused("BiasSoftmax", (X, r(5, 8)), {"axis": -1, "is_inner_broadcast": 1}, kernel=False),
    "BiasAdd": Fused("BiasAdd", (X, r(8), X), kernel=False),
    "BiasSplitGelu": Fused("BiasSplitGelu", (X, r(8)), kernel=False),
}  # fmt: skip


def _gelu(x: np.ndarray) -> np.ndarray:
    return (x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))).astype(np.float32)


def _swiglu(gate: np.ndarray, up: np.ndarray | None = None, /, **given: Any) -> np.ndarray:
    gate, up = np.split(gate, 2, -1) if up is None else (gate, up)
    limit = given.get("limit", np.inf)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-given["activation_alpha"] * gate)) * (up + given.get("activation_beta", 0.0))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


EXPECTED = {  # of those for which onnxruntime has no CPU kernel
    "BiasDropout": lambda x, b, s: x + b + s,
    "BiasSoftmax": lambda x, b: _softmax(x + b),
    "BiasAdd": lambda x, b, s: x + b + s,
    "SwiGLU": _swiglu,
    "BiasSplitGelu": lambda x, b: (x + b)[..., :4] * _gelu((x + b)[..., 4:]),
}


def _model(row: Fused) -> onnx.ModelProto:
    """The first input is the model's, all others are initializers."""
    names = [f"i{n}" if v is not None else "" for n, v in enumerate(row.inputs)]
    node = helper.make_node(row.op, names, row.outputs, domain=row.domain, **row.attributes)
    first = helper.make_tensor_value_info(
        "i0", helper.np_dtype_to_tensor_dtype(row.inputs[0].dtype), row.inputs[0].shape
    )
    made = [helper.make_empty_tensor_value_info(n) for n in row.outputs if n]
    weights = [numpy_helper.from_array(v, n) for n, v in zip(names[1:], row.inputs[1:], strict=True) if v is not None]
    graph = helper.make_graph([node], "g", [first], made, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(made) for made in session.run(None, feeds)]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_same_numbers(row: Fused) -> None:
    proto = _model(row)
    graph = read_forward(proto)
    assert not any(is_fused(node) for node in graph.model.graph)
    assert graph.signature.outputs == tuple(n for n in row.outputs if n)
    weights = {n.name: numpy_helper.to_array(n) for n in proto.graph.initializer}
    feeds = {"i0": row.inputs[0]}
    if row.op == "FusedConv" and len(row.inputs) > 3:
        needs_release("1.24", "its Conv of blocked layout refuses a sum")
    if row.since:
        needs_release(row.since, f"it has no {row.op} of that form")
    settings = row.attributes if row.op == "SwiGLU" else {}
    expected = _run(proto, feeds) if row.kernel else [EXPECTED[row.op](*row.inputs, **settings)]
    made = _run(ir.to_proto(attach(graph.model)), feeds | {n: weights[n] for n in graph.signature.parameters})
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "row", [v for v in ROWS.values() if len(v.inputs) > 1], ids=[n for n, v in ROWS.items() if len(v.inputs) > 1]
)
def test_trains(row: Fused) -> None:
    graph = read_forward(_model(row))
    differentiable = graph.signature.parameters
    compiled = compile_graph(graph, differentiable, graph.signature.outputs, Options(), Report())
    assert compiled.training is not None and set(compiled.training.gradients) == set(differentiable)


@pytest.mark.parametrize(
    ("name", "setting"), [("CausalConvWithState", "channels_last"), ("LinearAttention", "state_window")]
)
def test_what_is_not_there_is_refused(name: str, setting: str) -> None:
    row = dataclasses.replace(ROWS[name], attributes=ROWS[name].attributes | {setting: 1})
    with pytest.raises(GraphError, match=f"{name} with {setting}=1 is not available"):
        read_forward(_model(row))


def test_in_a_body() -> None:
    """A fused node inside of a branch is written out as well."""
    body = helper.make_graph(
        [helper.make_node("BiasGelu", ["x", "b"], ["z"], domain="com.microsoft")],
        "t",
        [],
        [helper.make_empty_tensor_value_info("z")],
    )
    other = helper.make_graph(
        [helper.make_node("Add", ["x", "b"], ["q"])], "e", [], [helper.make_empty_tensor_value_info("q")]
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=other)], "g",
        [helper.make_tensor_value_info("x", 1, ["n", 4]), helper.make_tensor_value_info("c", 9, [])],
        [helper.make_empty_tensor_value_info("y")], [numpy_helper.from_array(r(4), "b")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    read = read_forward(helper.make_model(graph, opset_imports=opsets))
    assert not any(is_fused(node) for node in read.model.graph.all_nodes())
    assert read.model.graph.outputs[0].dtype == ir.DataType.FLOAT
    compiled = compile_graph(read, ("b",), ("y",), Options(), Report())
    assert compiled.training is not None and set(compiled.training.gradients) == {"b"}


def test_a_file_that_onnxruntime_optimized(tmp_path: Path) -> None:
    """The optimizer of the CPU fuses what it knows; the same numbers, and all weights train."""
    rows = """a = MatMul(x, w) b = Add(a, u) c = Div(b, root) d = Erf(c) e = Add(d, one) f = Mul(b, e) g = Mul(f, half)
        h = Add(g, x) m = LayerNormalization(h, s, t) n = Transpose<perm = [0, 2, 1]>(m) y = MatMul(m, n)"""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[b, 5, 8] x) => (float[b, 5, 5] y) { '
    proto = onnx.parser.parse_model(text + rows + " }")
    weights = {"w": r(8, 8), "u": r(8), "s": r(8), "t": r(8)}
    numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5}
    for name, content in (weights | {n: np.array(v, np.float32) for n, v in numbers.items()}).items():
        proto.graph.initializer.append(numpy_helper.from_array(content, name))
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(proto.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert {"com.microsoft"} <= {n.domain for n in optimized.graph.node}
    graph = read_forward(tmp_path / "optimized.onnx")
    assert {n.domain for n in graph.model.graph} == {""}
    kept = {i.name: numpy_helper.to_array(i) for i in optimized.graph.initializer}
    (y,) = _run(ir.to_proto(attach(graph.model)), {"x": X} | {n: kept[n] for n in graph.signature.parameters})
    np.testing.assert_allclose(y, _run(proto, {"x": X})[0], rtol=1e-4, atol=1e-4)
    compiled = compile_graph(graph, graph.signature.parameters, ("y",), Options(), Report())
    assert compiled.training is not None and set(compiled.training.gradients) == set(graph.signature.parameters)


def test_what_is_not_available_says_so() -> None:
    row = Fused("FusedConv", (r(1, 2, 4, 4), r(3, 2, 1, 1)), {"activation": "Mystery"})
    with pytest.raises(GraphError, match="activation Mystery"):
        read_forward(_model(row))
