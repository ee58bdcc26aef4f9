"""Models of onnxruntime's quantizer are trained on: integers become weights, and integers again when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from releases import needs_release
from test_adapters import exported

from onnxtrain import dequantize_weights
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ArtifactError

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(96, 1, 6, 6)).astype(np.float32)
LABELS = np.stack([IMAGES[:, 0, :3, :3], IMAGES[:, 0, :3, 3:], IMAGES[:, 0, 3:, :3]]).sum((2, 3)).argmax(0)


class Calibration(CalibrationDataReader):
    def __init__(self) -> None:
        self.batches = iter([{"input": IMAGES[i : i + 32]} for i in (0, 32, 64)])

    def get_next(self) -> Any:
        return next(self.batches, None)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(72, 3),
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)  # half trained: so far the ranges of activations go
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.tensor(IMAGES)), torch.tensor(LABELS)).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("network") / "float.onnx"
    onnx.save(exported(module, torch.tensor(IMAGES[:4])), path)
    return path


def quantized(network: Path, folder: Path, per_channel: bool, kind: QuantType = QuantType.QInt8) -> onnx.ModelProto:
    """The network in integers; signed weights in 7 bits, as sums of 8 saturate in kernels of machines without VNNI."""
    given = {"quant_format": QuantFormat.QDQ, "per_channel": per_channel, "weight_type": kind, "reduce_range": True}
    quantize_static(network, folder / "quantized.onnx", Calibration(), activation_type=QuantType.QUInt8, **given)
    return onnx.load(folder / "quantized.onnx")


def run(model: onnx.ModelProto | Path, x: np.ndarray) -> np.ndarray:
    given = model if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(given, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_quantized_network_is_trained(network: Path, tmp_path: Path, per_channel: bool, kind: QuantType) -> None:
    if kind == QuantType.QInt8 and not per_channel:
        needs_release("1.24", "it computes other sums where it fuses signed weights of one scale")
    given = quantized(network, tmp_path, per_channel, kind)
    before = initializers(given)
    assert before["0.weight_quantized"].dtype in (np.int8, np.uint8) and "0.weight" not in before
    model = dequantize_weights(given)
    onnx.checker.check_model(model, full_check=True)
    weights = initializers(model)
    assert weights["0.weight"].dtype == np.float32 and "0.weight_quantized" not in weights
    np.testing.assert_allclose(run(model, IMAGES), run(given, IMAGES), rtol=0, atol=1e-5)
    files = generate_artifacts(
        model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    assert {p.name for p in state.parameters.values()} == {"0.weight", "0.bias", "4.weight", "4.bias"}
    module = Module(files["training_model"], state, files["eval_model"])
    optimizer, losses = Optimizer(files["optimizer_model"], module), []
    optimizer.set_learning_rate(0.01)
    for step in range(50):
        rows = slice(32 * (step % 3), 32 * (step % 3) + 32)
        losses.append(float(module(IMAGES[rows], LABELS[rows])))
        optimizer.step()
        module.lazy_reset_grad()
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    module.export_model_for_inferencing(tmp_path / "trained.onnx")
    after = onnx.load(tmp_path / "trained.onnx")
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in model.graph.node]
    accuracy = [(run(m, IMAGES).argmax(1) == LABELS).mean() for m in (given, after)]
    assert accuracy[1] > 0.98 > 0.95 > accuracy[0]


def fake_quantized(x: torch.Tensor, scale: Any, zero: Any, low: int, high: int) -> torch.Tensor:
    """Straight through where the value is in range."""
    scale = torch.as_tensor(np.asarray(scale), dtype=x.dtype)
    level = torch.round(x / scale) + float(zero)
    rounded = (level.clamp(low, high) - float(zero)) * scale
    return torch.where((level >= low) & (level <= high), x + (rounded - x).detach(), rounded.detach())


def test_the_gradient_is_that_of_fake_quantization(tmp_path: Path) -> None:
    needs_release("1.24", "it fuses weights without zero points to what it then refuses")
    scale, weight = RNG.uniform(0.01, 0.02, 3).astype(np.float32), RNG.integers(-127, 128, (5, 3)).astype(np.int8)
    bias = RNG.integers(-1000, 1000, 3).astype(np.int32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["d"]),
        helper.make_node("DequantizeLinear", ["w_quantized", "ws"], ["w_d"], axis=1),
        helper.make_node("DequantizeLinear", ["b_quantized", "bs"], ["b_d"], axis=0),
        helper.make_node("Gemm", ["d", "w_d", "b_d"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "ys", "yz"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]),
    ]
    constants = {
        "xs": np.array(0.02, np.float32), "xz": np.array(120, np.uint8), "w_quantized": weight, "ws": scale,
        "b_quantized": bias, "bs": scale * np.float32(0.02), "ys": np.array(0.05, np.float32),
        "yz": np.array(3, np.int8),
    }  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", k]) for n, k in (("x", 5), ("y", 3)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(v, n) for n, v in constants.items()])
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    files = generate_artifacts(
        dequantize_weights(given), loss=LossType.MSELoss, artifact_directory=tmp_path, additional_output_names=["y"]
    )
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    batch, target = RNG.normal(size=(16, 5)).astype(np.float32) * 1.5, RNG.normal(size=(16, 3)).astype(np.float32)
    loss, found = Module(files["training_model"], state)(batch, target)
    np.testing.assert_allclose(found, run(given, batch), atol=1e-5)
    w = torch.tensor(weight * scale, requires_grad=True)
    b = torch.tensor(bias * scale * np.float32(0.02), requires_grad=True)
    inner = fake_quantized(torch.tensor(batch), 0.02, 120, 0, 255) @ fake_quantized(w, scale, 0, -128, 127) + b
    given_back = fake_quantized(inner, 0.05, 3, -128, 127)
    expected = torch.nn.functional.mse_loss(given_back, torch.tensor(target, dtype=given_back.dtype))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(state.parameters["w"].data, w.detach(), rtol=1e-6)
    np.testing.assert_allclose(state.parameters["w"].grad, w.grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state.parameters["b"].grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("channels", [False, True])
def test_scales_that_are_named_are_trained(tmp_path: Path, channels: bool) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "scale", "zero"], ["q"], axis=0),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], axis=0),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    w, form = RNG.normal(size=(5, 3)).astype(np.float32), (5,) if channels else ()
    scale, zero = RNG.uniform(0.005, 0.02, form).astype(np.float32), np.full(form, 3, np.int8)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", k]) for n, k in (("x", 5), ("y", 3)))
    tensors = [numpy_helper.from_array(v, n) for n, v in (("w", w), ("scale", scale), ("zero", zero))]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    files = generate_artifacts(given, ["w", "scale"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(files["checkpoint"])
    batch, target = RNG.normal(size=(16, 5)).astype(np.float32), RNG.normal(size=(16, 3)).astype(np.float32)
    Module(files["training_model"], state)(batch, target)
    leaves = [torch.tensor(v, requires_grad=True) for v in (w, scale.reshape(-1))]
    zeros = torch.full((leaves[1].numel(),), 3.0)
    if channels:
        rounded = torch._fake_quantize_learnable_per_channel_affine(*leaves, zeros, 0, -128, 127, 1.0)
    else:
        rounded = torch._fake_quantize_learnable_per_tensor_affine(*leaves, zeros, -128, 127, 1.0)
    torch.nn.functional.mse_loss(torch.tensor(batch) @ rounded, torch.tensor(target)).backward()
    for name, leaf in zip(("w", "scale"), leaves, strict=True):
        expected = leaf.grad.numpy().reshape(state.parameters[name].grad.shape)
        np.testing.assert_allclose(state.parameters[name].grad, expected, rtol=2e-4, atol=1e-5)


def test_models_without_quantized_weights_are_refused(network: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no weight that is stored as integers"):
        dequantize_weights(network)
    given = quantized(network, tmp_path, per_channel=False)
    with pytest.raises(ArtifactError, match=r"dequantize_weights\(model\)"):
        generate_artifacts(given, ["0.weight_quantized"], loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
