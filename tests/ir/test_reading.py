"""Any .onnx model becomes a forward graph that trains, under its own names, or one error that names the file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from releases import needs_opset

from onnxtrain import Options
from onnxtrain.compiler import Report, compile_graph
from onnxtrain.errors import GraphError
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph
from onnxtrain.ir.opsets import NEWEST
from onnxtrain.ir.reading import read_forward
from onnxtrain.ir.standard_form import attach
from onnxtrain.ir.verify import verify

RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 4))
X = RNG.normal(size=(3, 4)).astype(np.float32)


def model(body: str, opset: int = 20, ir_version: int = 10, inputs: str = "float[b, 4] x") -> onnx.ModelProto:
    """A model of the weights ``w`` (4, 4) and ``v`` (4) and an output ``y``."""
    text = f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "own" : 1]> g ({inputs}) => (float[b, n] y)'
    made = parser.parse_model(text + f" {{ {body} }}".replace("'", '"'))
    for name, content in {"w": W, "v": W[0]}.items():
        made.graph.initializer.append(numpy_helper.from_array(content.astype(np.float32), name))
    return made


def run(graph: ForwardGraph, x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    made = ir.to_proto(attach(graph.model))
    (y,) = ReferenceEvaluator(made).run(None, {"x": x, **weights})
    return np.asarray(y)


def trains(graph: ForwardGraph, *backends: str) -> None:
    """Every parameter receives a gradient on the backends."""
    for name in backends or ("torch", "onnxruntime"):
        options = Options(backend=name)
        compiled = compile_graph(graph, graph.signature.parameters, graph.signature.outputs, options, Report())
        assert compiled.training is not None and set(compiled.training.gradients) == set(graph.signature.parameters)


FORMS = {
    "plain": model("a = MatMul(x, w) y = Mul(a, v)"),
    "opset 22": model("a = MatMul(x, w) b = Tanh(a) y = Mul(b, v)", 22),
    "opset 23": model("a = MatMul(x, w) y = RMSNormalization(a, v)", 23, 11),
    "opset 24": model("a = MatMul(x, w) b = Swish(a) y = Mul(b, v)", 24, 12),
    "opset 25": model("a = MatMul(x, w) b = Reshape(a, s) y = Mul(b, v)", 25, 13),
    "opset 28": model("a = MatMul(x, w) b = SwiGLU(a, x) y = Mul(b, v)", 28, 13),
    "opset 13": model("a = MatMul(x, w) b = ReduceMax<axes = [1]>(a) c = Sub(a, b) y = Mul(c, v)", 13, 8),
    "opset 9": model("a = MatMul(x, w) b = Softmax<axis = 1>(a) c = Unsqueeze<axes = [0]>(v) y = Mul(b, c)", 9, 4),
    "weights that are inputs": model(
        "a = MatMul(x, w) y = Mul(a, v)", 9, 3, "float[b, 4] x, float[4, 4] w, float[4] v, int64[2] s"
    ),
}  # fmt: skip
for _proto in FORMS.values():
    _proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, 4]), "s"))


@pytest.mark.parametrize("proto", FORMS.values(), ids=FORMS)
def test_forms_of_a_model(proto: onnx.ModelProto) -> None:
    needs_opset(next(o.version for o in proto.opset_import if not o.domain))
    before = proto.SerializeToString()
    graph = read_forward(proto)
    assert proto.SerializeToString() == before
    assert graph.signature.user_inputs == ("x",) and graph.signature.outputs == ("y",)
    assert graph.signature.parameters == ("w", "v")
    assert "s" in graph.model.graph.initializers
    weights = {i.name: numpy_helper.to_array(i) for i in proto.graph.initializer if i.name in "wv"}
    (made,) = ReferenceEvaluator(proto).run(None, {"x": X})
    expected = np.asarray(made)
    np.testing.assert_allclose(run(graph, X, weights), expected, rtol=1e-6, atol=1e-6)
    trains(graph)


def test_paths_protos_and_models(tmp_path: Path) -> None:
    proto = FORMS["plain"]
    onnx.save(proto, tmp_path / "m.onnx")
    held = ir.from_proto(proto)
    texts = {
        ir.to_proto(read_forward(source).model).SerializeToString(deterministic=True)
        for source in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), proto, held)
    }
    assert len(texts) == 1
    assert set(held.graph.initializers) == {"w", "v", "s"} and len(held.graph.inputs) == 1


def test_data_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "m.onnx"
    proto = model("a = MatMul(x, w) b = Add(a, w) y = Mul(b, v)")
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    graph = read_forward(path, ["v"])
    tensor = graph.model.graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), W.astype(np.float32))
    (path.parent / "m.data").write_bytes(b"short")
    with pytest.raises(GraphError, match=r"m\.onnx"):
        read_forward(path)


def test_control_flow_trains_on_the_weights_it_reads() -> None:
    body = "s = ReduceSum<keepdims = 0>(x) z = Sub(s, s) c = Greater(s, z) "
    body += "a = If(c) <then_branch = t () => (float[b, 4] p)"
    body += "{ p = MatMul(x, w) }, else_branch = e () => (float[b, 4] q) { q = Add(x, w) }> y = Mul(a, v)"
    graph = read_forward(model(body))
    assert [n.domain for n in graph.model.graph if n.op_type == "If"] == [DOMAIN]
    trains(graph)


def test_a_weight_inside_of_a_body_trains() -> None:
    body = "s = ReduceSum<keepdims = 0>(x) c = Greater(s, s) a = If(c) <then_branch = t () => (float[b, 4] p) "
    body += "{ p = MatMul(x, w) }, else_branch = e () => (float[b, 4] q) { q = Mul(x, u) }> y = Mul(a, v)"
    proto = model(body)
    (branch,) = (a.g for a in proto.graph.node[2].attribute if a.name == "else_branch")
    branch.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "u"))
    graph = read_forward(proto)
    assert graph.signature.parameters == ("w", "v", "u")
    trains(graph)


def test_outputs_that_no_node_makes() -> None:
    """An input, and a weight, whose gradient then has two of its names wanted: one receives, one gives."""
    proto = model("a = MatMul(x, w) y = Mul(a, v) v_grad = Relu(y)")
    for name, shape in {"x": ["b", 4], "w": [4, 4], "v_grad": None}.items():
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    graph = read_forward(proto)
    assert graph.signature.outputs == ("y", "x", "w", "v_grad")
    trains(graph)


@pytest.mark.parametrize("prefix", ["const", "val", "node"])
def test_names_that_we_would_give_as_well(prefix: str) -> None:
    a, b, c, d = (f"{prefix}_{i}" for i in range(4))
    rows = f"{a} = MatMul(x, w) {b} = Gelu({a}) {c} = Mul({b}, v) {d} = Softmax({c}) y = Pow({d}, {d})"
    trains(read_forward(model(rows)))


def test_statistics_are_no_weights() -> None:
    proto = model("a = MatMul(x, w) y = BatchNormalization(a, v, v, mean, var)")
    for name in ("mean", "var"):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), name))
    assert read_forward(proto).signature.parameters == ("w", "v")
    assert read_forward(proto, ["mean"]).signature.parameters == ("mean",)


def test_constants_train_where_they_are_named() -> None:
    constant = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.ones(4, np.float32)))
    proto = model("a = MatMul(x, w) b = Mul(a, k) y = Mul(b, v)")
    proto.graph.node.insert(0, constant)
    assert read_forward(proto).signature.parameters == ("w", "v")
    everything = read_forward(FORMS["opset 25"], ["*"])
    assert everything.signature.parameters == ("w", "v") and "s" in everything.model.graph.initializers
    with pytest.raises(GraphError, match="s is not floating"):
        read_forward(FORMS["opset 25"], ["s"])
    graph = read_forward(proto, ["k", "w"])
    assert graph.signature.parameters == ("k", "w") and "v" in graph.model.graph.initializers
    trains(graph)


@pytest.mark.parametrize("dtype", [TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_element_types_stay(dtype: int) -> None:
    proto = model("a = MatMul(x, w) y = Mul(a, v)")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = dtype
    for index, content in enumerate((W, W[0])):
        name, kind = proto.graph.initializer[index].name, helper.tensor_dtype_to_np_dtype(dtype)
        proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(content.astype(kind), name))
    graph = read_forward(proto)
    assert {int(v.dtype or 0) for v in (*graph.model.graph.inputs, *graph.model.graph.outputs)} == {dtype}
    verify(graph.model)


@pytest.mark.parametrize("settings", [{"dynamo": False, "opset_version": 14}, {"dynamo": True, "opset_version": 23}])
@pytest.mark.filterwarnings("ignore")
def test_files_that_torch_wrote(settings: dict[str, Any], tmp_path: Path) -> None:
    """Gradients by the names of the file are those of the module; weights that the exporter transposed are, too."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    module = torch.nn.Sequential(torch.nn.Conv1d(3, 5, 2, padding=1), layer, torch.nn.Linear(8, 2)).train()
    for parameter in module.parameters():  # exporters merge weights that are equal
        torch.nn.init.normal_(parameter, std=0.5)
    given = torch.randn(4, 3, 7)
    path = tmp_path / "torch.onnx"
    torch.onnx.export(module, (given,), path, input_names=["x"], do_constant_folding=False, **settings)
    graph = read_forward(path)
    y = module(given)
    y.sum().backward()
    compiled = compile_graph(graph, graph.signature.parameters, graph.signature.outputs, Options(), Report())
    weights = {i.name: numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}
    feeds = [given, *(torch.from_numpy(np.array(weights[n])) for n in graph.signature.parameters)]
    (ours,), saved = compiled.executable.forward(feeds)
    torch.testing.assert_close(ours, y.detach(), rtol=1e-4, atol=1e-5)
    found = dict(zip(compiled.plan.gradients, compiled.executable.backward(saved, [torch.ones_like(y)]), strict=True))
    expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert len(found) == len(expected) and sum(n in expected for n in found) >= len(expected) // 2
    for name, gradient in found.items():
        known = (
            [expected[name]] if name in expected else [t for g in expected.values() if g.dim() == 2 for t in (g, g.T)]
        )
        near = [torch.allclose(gradient, k, rtol=1e-3, atol=1e-4) for k in known if k.shape == gradient.shape]
        assert any(near), name


def test_functions_of_the_model_are_inlined() -> None:
    inner = helper.make_function(
        "own", "Inner", ["a"], ["b"], [helper.make_node("ReduceMax", ["a"], ["b"], axes=[1])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    outer = parser.parse_function(
        '<opset_import: ["" : 17, "own" : 1], domain: "own"> Outer <slope> (a, w) => (y) '
        "{ m = MatMul(a, w) t = own.Inner(m) d = Sub(m, t) y = LeakyRelu<alpha: float = @slope>(d) }"
    )
    proto = model("a = own.Outer<slope = 0.5>(x, w) y = own.Outer<slope = 0.25>(a, w)")
    proto.functions.extend([inner, outer])
    graph = read_forward(proto, ["w"])
    assert not graph.model.functions and {n.domain for n in graph.model.graph} == {""}
    m = X @ W.astype(np.float32)
    a = m - m.max(1, keepdims=True)
    m = (a * 0.5) @ W.astype(np.float32)
    expected = (m - m.max(1, keepdims=True)) * 0.25
    np.testing.assert_allclose(run(graph, X, {"w": W.astype(np.float32)}), expected, rtol=1e-5, atol=1e-5)
    trains(graph)


def test_pixels_of_old_resizing_stay_in_their_place() -> None:
    text = '<ir_version: 3, opset_import: ["" : 9]> g (float[1, 1, 3, 3] x, float[4] s) => (float[a, b, c, d] y) '
    proto = parser.parse_model(text + '{ y = Upsample<mode = "linear">(x, s) }')
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s"))
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    y = run(read_forward(proto), x, {})
    np.testing.assert_allclose(y[0, 0, 0], [0, 0.5, 1, 1.5, 2, 2])


LATER = {
    "a later attribute": ("y = Cast<to = 1, round_mode = 'down'>(x)", 24, "Cast of opset 24 with round_mode=down"),
    "a later opset": ("y = Relu(x)", NEWEST + 1, f"opset {NEWEST + 1}"),
    "an attribute that is not": ("y = Relu<axis = 1>(x)", 20, "no attribute axis"),
    "an attribute that is missing": ("y = Concat(x, x)", 20, "axis is missing"),
    "an attribute of another type": ("y = Concat<axis = 1.0>(x, x)", 20, "axis is no INT"),
    "too few inputs": ("y = Mul(x)", 20, "1 inputs"),
    "no such value": ("y = Mul(x, nothing)", 20, "nothing is not defined"),
    "twice the same": ("a = Relu(x) a = Relu(x) y = Relu(a)", 20, "a"),
    "shapes that contradict": ("a = Concat<axis = 0>(w, w) y = MatMul(w, a)", 20, "MatMul"),
}


@pytest.mark.parametrize(("body", "opset", "told"), LATER.values(), ids=LATER)
def test_what_is_wrong_is_named(body: str, opset: int, told: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.onnx"
    path.write_bytes(model(body, opset, 12).SerializeToString())
    with pytest.raises(GraphError, match=told) as raised:
        read_forward(path)
    assert "wrong.onnx" in str(raised.value)


def test_a_later_attribute_with_its_default_is_taken_away() -> None:
    graph = read_forward(model("y = Cast<to = 1, round_mode = 'up'>(x)", 24, 12), ["w"])
    assert list(graph.model.graph[0].attributes) == ["to"]


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    rng, path, failed = random.Random(0), tmp_path / "damaged.onnx", 0
    contents = [FORMS[name].SerializeToString() for name in ("opset 9", "opset 13", "opset 23")]
    for index in range(150):
        content = bytearray(contents[index % 3])
        if index % 2:
            del content[rng.randrange(len(content)) :]
        for _ in range(3):
            if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            read_forward(path)
        except GraphError as error:
            failed += 1
            assert "damaged.onnx" in str(error)
    assert failed > 50


def _with_dims(dims: Sequence[str | int | None], stated: Sequence[str | int | None]) -> onnx.ModelProto:
    """``y = x · x`` under names of sizes that a file gives its input and its output."""
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", dims), ("y", stated))
    )
    graph = onnx.helper.make_graph([onnx.helper.make_node("Mul", ["x", "x"], ["y"])], "square", [x], [y])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])


ODD_NAMES = ["output-0_dim0", "batch size", "N/2", "2*N", "?", "lambda", "x:0", "1st", "s0 +", "Max(", "批", "a.b"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_text_names_a_dimension(name: str) -> None:
    graph = read_forward(_with_dims([name, name, "N", 3], ["other", "other", "N", 3])).model.graph
    for value in (*graph.inputs, *graph.outputs):
        first, second, third, last = shapes.known_dims(value)
        assert first == second == shapes.known_dims(graph.inputs[0])[0] and first != third and last == 3
        assert isinstance(first, ir.SymbolicDim) and str(first.value).isidentifier()


def test_names_that_would_become_the_same_symbol_stay_apart() -> None:
    graph = read_forward(_with_dims(["a-b", "a_b", "a b", "x_dim3", None], [None] * 5)).model.graph
    dims = shapes.known_dims(graph.outputs[0])
    assert len({d.value for d in dims if isinstance(d, ir.SymbolicDim)}) == 5
    assert dims == shapes.known_dims(graph.inputs[0])


@pytest.mark.parametrize("stated", [[1, 3], [7, 3], ["M", "K"], [-1, 3], [None, None], ["", 4]])
def test_inference_knows_better_than_what_a_file_states(stated: list[str | int | None]) -> None:
    graph = read_forward(_with_dims(["N", 3], stated)).model.graph
    assert shapes.known_dims(graph.outputs[0]) == (ir.SymbolicDim("N"), 3)


def test_what_a_file_states_counts_where_inference_knows_nothing() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    nonzero (float[N] x) => (int64[1, K] y) { y = NonZero (x) }
    """
    graph = read_forward(onnx.parser.parse_model(text)).model.graph
    assert shapes.known_dims(graph.outputs[0]) == (1, ir.SymbolicDim("K"))
