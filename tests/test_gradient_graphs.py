"""Gradients as models: what onnxruntime computes with them is what autograd computes, first and second derivatives."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper, parser
from releases import needs_release
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain import gradient_graph, lora
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.errors import GradientError

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w1": RNG.normal(size=(3, 8)),
    "b1": RNG.normal(size=(8,)),
    "w2": RNG.normal(size=(8, 2)),
    "gain": RNG.normal(size=(8,)),
    "bias": RNG.normal(size=(8,)),
    "scale": np.array(0.75),  # exact in single precision: onnxruntime fuses it into MatMul as such
    "table": RNG.normal(size=(5, 3)),
}
X, DTYPE = RNG.normal(size=(4, 3)), {"float": np.float32, "double": np.float64}


def model(body: str, outputs: str, dtype: str = "double", inputs: str = "{0}[b, 3] x") -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({inputs}) => ({outputs}) {{ {body} }}'
    made = parser.parse_model(text.replace("{0}", dtype).replace("'", '"'))
    used = {name for node in made.graph.node for name in node.input}
    for name, content in WEIGHTS.items():
        if name in used:
            made.graph.initializer.append(numpy_helper.from_array(content.astype(DTYPE[dtype]), name))
    return made


def run(proto: onnx.ModelProto, **inputs: Any) -> dict[str, np.ndarray]:
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert {i.name for i in session.get_inputs()} == set(inputs)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))


def leaves(*names: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {n: torch.tensor(WEIGHTS.get(n, X), dtype=dtype, requires_grad=True) for n in names}


def names_of(proto: onnx.ModelProto) -> list[str]:
    return [o.name for o in proto.graph.output]


MLP = "a = MatMul(x, w1) b = Add(a, b1) h = Tanh(b) s = MatMul(h, w2) y = Mul(s, scale)"


def mlp(v: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.tanh(v["x"] @ v["w1"] + v["b1"]) @ v["w2"] * v["scale"]


def test_gradients_of_inputs_and_weights() -> None:
    needs_release("1.24", "it fuses what it has a kernel of single precision for, in double too")
    before = (given := model(MLP, "{0}[b, 2] y")).SerializeToString()
    made = gradient_graph(given, ["w1", "x", "scale"])
    assert given.SerializeToString() == before
    assert names_of(made) == ["y", "w1_grad", "x_grad", "scale_grad"]
    assert {"w1", "b1", "w2", "scale"} <= {i.name for i in made.graph.initializer}
    found, v = run(made, x=X), leaves("x", "w1", "b1", "w2", "scale")
    y = mlp(v)
    y.sum().backward()
    np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-12)
    for name in ("x", "w1", "scale"):
        np.testing.assert_allclose(found[f"{name}_grad"], v[name].grad, rtol=1e-10)


def test_seeds_are_inputs_where_they_are_asked_for() -> None:
    made = gradient_graph(model(MLP, "{0}[b, 2] y"), "x", "y", seeds=True, keep_outputs=False)
    assert names_of(made) == ["x_grad"]
    dy, v = RNG.normal(size=(4, 2)), leaves("x", "w1", "b1", "w2", "scale")
    found = run(made, x=X, y_grad=dy)["x_grad"]
    mlp(v).backward(torch.tensor(dy))
    np.testing.assert_allclose(found, v["x"].grad, rtol=1e-10)


def test_outputs_are_summed_or_chosen() -> None:
    given = model(f"{MLP} z = Exp(b) n = ArgMax<axis = 1>(y)", "{0}[b, 2] y, {0}[b, 8] z, int64[b, 1] n")
    v = leaves("x", "w1", "b1", "w2", "scale")
    parts = {"y": mlp(v).sum(), "z": torch.exp(v["x"] @ v["w1"] + v["b1"]).sum()}
    for outputs in (None, "y", ["z"]):
        chosen = parts if outputs is None else outputs
        expected = torch.autograd.grad(sum(parts[n] for n in chosen), v["x"], retain_graph=True)[0]
        found = run(gradient_graph(given, "x", outputs), x=X)
        assert list(found) == ["y", "z", "n", "x_grad"]
        np.testing.assert_allclose(found["x_grad"], expected, rtol=1e-10)


def test_a_shape_that_is_known_at_run_time_only() -> None:
    made = gradient_graph(model(MLP, "{0}[b, 2] y"), "x", keep_outputs=False)
    for rows in (1, 5):
        x = RNG.normal(size=(rows, 3))
        v = leaves("w1", "b1", "w2", "scale") | {"x": torch.tensor(x, requires_grad=True)}
        mlp(v).sum().backward()
        np.testing.assert_allclose(run(made, x=x)["x_grad"], v["x"].grad, rtol=1e-10)


ENERGY = "a = MatMul(x, w1) b = Add(a, b1) h = {act} s = MatMul(h, w2) e = ReduceSum<keepdims = 0>(s)"
ACTIVATIONS = {
    "tanh": ("Tanh(b)", torch.tanh),
    "sigmoid": ("Sigmoid(b)", torch.sigmoid),
    "gelu": ("Gelu(b)", torch.nn.functional.gelu),
    "tanh-gelu": ("Gelu<approximate = 'tanh'>(b)", lambda b: torch.nn.functional.gelu(b, approximate="tanh")),
    "softplus": ("Softplus(b)", torch.nn.functional.softplus),
    "silu": ("Mul(b, t) ", torch.nn.functional.silu),
    "softmax": ("Softmax<axis = -1>(b)", lambda b: b.softmax(-1)),
    "log-softmax": ("LogSoftmax<axis = -1>(b)", lambda b: b.log_softmax(-1)),
    "layer norm": ("LayerNormalization<axis = -1>(b, gain, bias)", None),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_forces_that_are_trained_on(kind: str) -> None:
    """Energy to forces to the gradient of an error of forces: the double backward."""
    text, function = ACTIVATIONS[kind]
    body = ENERGY.replace("{act}", text).replace("h = Mul", "t = Sigmoid(b) h = Mul")
    forces = gradient_graph(model(body, "float e", "float"), "x", "e")
    assert names_of(forces) == ["e", "x_grad"]
    second = gradient_graph(forces, ["x", "w1", "b1", "w2"], "x_grad", seeds=True)
    assert names_of(second) == ["e", "x_grad", "x_grad_1", "w1_grad", "b1_grad", "w2_grad"]
    names = ["x", "w1", "w2", "b1", *(["gain", "bias"] if function is None else [])]
    v, seed = leaves(*names), RNG.normal(size=X.shape).astype(np.float32)
    b = v["x"] @ v["w1"] + v["b1"]
    h = torch.nn.functional.layer_norm(b, (8,), v["gain"], v["bias"]) if function is None else function(b)
    energy = (h @ v["w2"]).sum()
    (force,) = torch.autograd.grad(energy, v["x"], create_graph=True)
    force.backward(torch.tensor(seed).double())
    found = run(second, x=X.astype(np.float32), x_grad_grad=seed)
    np.testing.assert_allclose(found["x_grad"], force.detach(), rtol=1e-4, atol=1e-5)
    for name, ours in zip(["x", "w1", "b1", "w2"], list(found)[2:], strict=True):
        np.testing.assert_allclose(found[ours], v[name].grad, rtol=1e-4, atol=2e-5, err_msg=name)


def test_gradients_of_constant_nodes() -> None:
    given = model("s = Constant<value_float = 0.75>() a = MatMul(x, w1) y = Mul(a, s)", "{0}[b, 8] y", "float")
    found, v = run(gradient_graph(given, ["s", "w1"]), x=X.astype(np.float32)), leaves("x", "w1", "scale")
    (v["x"] @ v["w1"] * v["scale"]).sum().backward()
    np.testing.assert_allclose(found["s_grad"], v["scale"].grad, rtol=1e-5)
    np.testing.assert_allclose(found["w1_grad"], v["w1"].grad, rtol=1e-5)


def test_a_wrong_name_is_an_error() -> None:
    given = model(f"{MLP} n = ArgMax<axis = 1>(y)", "{0}[b, 2] y, int64[b, 1] n")
    with pytest.raises(GradientError, match="no input or initializer w11; close names: w1"):
        gradient_graph(given, "w11")
    with pytest.raises(GradientError, match="no output yy; close names: y"):
        gradient_graph(given, "x", "yy")
    with pytest.raises(GradientError, match="the output n does not depend on x"):
        gradient_graph(given, "x", "n")
    with pytest.raises(GradientError, match="wrt is empty"):
        gradient_graph(given, [])
    ids = model("a = Gather(table, ids) y = Exp(a)", "{0}[b, 3] y", inputs="int64[b] ids")
    with pytest.raises(GradientError, match="ids is of type INT64"):
        gradient_graph(ids, "ids")
    two = model(f"{MLP} z = Exp(x)", "{0}[b, 2] y, {0}[b, 3] z")
    with pytest.raises(GradientError, match="z does not depend on w1"):
        gradient_graph(two, ["x", "w1"], "z")


def test_an_operator_without_a_gradient_is_named() -> None:
    given = model("a = Exp(x) y = NonMaxSuppressed(a)", "{0}[b, 3] y")
    given.graph.node[1].op_type, given.graph.node[1].domain = "Mystery", "own"
    given.opset_import.add(domain="own", version=1)
    with pytest.raises(GradientError, match="no gradient rule for the operator own::Mystery"):
        gradient_graph(given, "x")


def test_forces_are_learned_as_any_output(tmp_path: Path) -> None:
    forces = gradient_graph(model(ENERGY.replace("{act}", "Gelu(b)"), "float e", "float"), "x", "e")
    files = generate_artifacts(
        forces, ["w*", "b1"], loss=LossType.MSELoss, loss_input_names=["x_grad"], artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    module = Module(files["training_model"], state)
    target = RNG.normal(size=X.shape).astype(np.float32)
    v, loss = leaves("x", "w1", "b1", "w2"), module(X.astype(np.float32), target)
    energy = (torch.nn.functional.gelu(v["x"] @ v["w1"] + v["b1"]) @ v["w2"]).sum()
    (force,) = torch.autograd.grad(energy, v["x"], create_graph=True)
    expected = torch.nn.functional.mse_loss(force, torch.tensor(target).double())
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    for name in ("w1", "b1", "w2"):
        np.testing.assert_allclose(state.parameters[name].grad, v[name].grad, rtol=1e-4, atol=1e-5)


def test_saliency_of_a_convolutional_network_from_a_file(tmp_path: Path) -> None:
    body = "c = Conv<pads = [1, 1, 1, 1]>(x, k) r = Relu(c) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)"
    body += " f = Flatten(p) y = Gemm(f, m)"
    given = model(body, "float[b, 3] y", "float", "float[b, 1, 4, 4] x")
    kernel, matrix = RNG.normal(size=(2, 1, 3, 3)), RNG.normal(size=(8, 3))
    for name, content in {"k": kernel, "m": matrix}.items():
        given.graph.initializer.append(numpy_helper.from_array(content.astype(np.float32), name))
    onnx.save(given, tmp_path / "model.onnx")
    image = RNG.normal(size=(2, 1, 4, 4)).astype(np.float32)
    found = run(gradient_graph(tmp_path / "model.onnx", "x", "y", seeds=True), x=image, y_grad=np.eye(2, 3, dtype="f"))
    x = torch.tensor(image, dtype=torch.float64, requires_grad=True)
    h = torch.nn.functional.conv2d(x, torch.tensor(kernel), padding=1).relu()
    y = torch.nn.functional.max_pool2d(h, 2).flatten(1) @ torch.tensor(matrix)
    y.backward(torch.eye(2, 3, dtype=torch.float64))
    np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["x_grad"], x.grad, rtol=1e-4, atol=1e-5)


class Energy(torch.nn.Module):
    """A number made of what a layer gives."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers[0] if len(layers) == 1 else torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return torch.sin(y[0] if isinstance(y, tuple) else y).pow(3).sum()


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)


def convolved(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Tanh(), *layers)


LAYERS = {
    "lstm": lambda: torch.nn.LSTM(3, 4, batch_first=True),
    "attention": SelfAttention,
    "convolution": convolved,
    "average pool": lambda: convolved(torch.nn.AvgPool2d(2)),
    "max pool": lambda: convolved(torch.nn.MaxPool2d(2)),
    "group norm": lambda: convolved(torch.nn.GroupNorm(1, 2)),
    "upsample": lambda: convolved(torch.nn.Upsample(scale_factor=2, mode="bilinear")),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_second_derivatives_of_layers(layer: str) -> None:
    torch.manual_seed(0)
    module = Energy(LAYERS[layer]()).eval()
    x = torch.randn(2, 5, 3) if layer in ("lstm", "attention") else torch.randn(2, 1, 4, 4)
    file = io.BytesIO()
    torch.onnx.export(module, (x,), file, input_names=["x"], output_names=["e"], dynamo=False, opset_version=20)
    once = gradient_graph(onnx.load_from_string(file.getvalue()), "x", "e")
    seed = RNG.normal(size=x.shape).astype(np.float32)
    found = run(gradient_graph(once, "x", "x_grad", seeds=True), x=x.numpy(), x_grad_grad=seed)
    leaf = x.double().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative; which one serves is torch's choice
        (first,) = torch.autograd.grad(module.double()(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf, torch.tensor(seed).double())
    np.testing.assert_allclose(found["x_grad"], first.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["x_grad_1"], second, rtol=1e-3, atol=1e-5 * float(second.abs().max()))


def test_data_beside_the_file_comes_along(tmp_path: Path) -> None:
    """Weights and large tables of a file are in what is made of it, wherever that is run."""
    given = model("a = Gather(order, i) b = Gather(x, a) c = MatMul(b, w1) y = Tanh(c)", "float[b, 8] y", "float")
    for name, content in {"order": np.arange(4)[::-1].copy(), "i": np.array([3, 1, 2, 0])}.items():
        given.graph.initializer.append(numpy_helper.from_array(content, name))
    expected = run(gradient_graph(given, ["x", "w1"]), x=X.astype(np.float32))
    onnx.save(given, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    made = gradient_graph(tmp_path / "model.onnx", ["x", "w1"])
    adapted = lora(tmp_path / "model.onnx", "w1", rank=2)
    files = generate_artifacts(
        tmp_path / "model.onnx", loss=LossType.MSELoss, artifact_directory=tmp_path / "artifacts"
    )
    (tmp_path / "model.data").unlink()
    for name, array in run(made, x=X.astype(np.float32)).items():
        np.testing.assert_array_equal(array, expected[name])
    np.testing.assert_array_equal(run(adapted, x=X.astype(np.float32))["y"], expected["y"])
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    loss = Module(files["training_model"], state)(X.astype(np.float32), np.zeros((4, 8), np.float32))
    np.testing.assert_allclose(loss, (expected["y"] ** 2).mean(), rtol=1e-6)
