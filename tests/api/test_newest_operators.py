"""Models of operators that came after opset 20 become artifacts and train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from releases import needs_opset

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

RNG = np.random.default_rng(0)


def model(opset: int, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], *dims: int | str) -> onnx.ModelProto:
    """A model of ``x`` and ``y``, of the same shape."""
    needs_opset(opset)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "xy"]
    held = [numpy_helper.from_array(content, name) for name, content in weights.items()]
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


def losses(
    folder: Path, made: onnx.ModelProto, optimizer_type: OptimType, rate: float, steps: int, *batch: np.ndarray
) -> tuple[list[float], np.ndarray]:
    """Of the steps; and what the exported model gives after them."""
    paths = generate_artifacts(made, loss=LossType.MSELoss, optimizer=optimizer_type, artifact_directory=folder)
    module = Module(paths["training_model"], CheckpointState.load_checkpoint(paths["checkpoint"]), paths["eval_model"])
    optimizer = Optimizer(paths["optimizer_model"], module)
    optimizer.set_learning_rate(rate)
    found = []
    for _ in range(steps):
        found.append(float(np.asarray(module(*batch))))
        optimizer.step()
        module.lazy_reset_grad()
    module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
    (y,) = ort.InferenceSession(folder / "trained.onnx").run(None, {"x": batch[0]})
    return found, np.asarray(y)


def weight(*shape: int) -> np.ndarray:
    return RNG.normal(0, 0.5, shape).astype(np.float32)


def test_swiglu_trains_as_in_torch(tmp_path: Path) -> None:
    held = {"gate": weight(6, 8), "up": weight(6, 8), "down": weight(8, 6)}
    nodes = [
        helper.make_node("MatMul", ["x", "gate"], ["a"]),
        helper.make_node("MatMul", ["x", "up"], ["b"]),
        helper.make_node("SwiGLU", ["a", "b"], ["h"]),
        helper.make_node("MatMul", ["h", "down"], ["y"]),
    ]
    x, target = weight(5, 6), weight(5, 6)
    found, y = losses(tmp_path, model(28, nodes, held, "batch", 6), OptimType.SGD, 0.5, 5, x, target)

    gate, up, down = (torch.tensor(v, requires_grad=True) for v in held.values())
    optimizer, expected = torch.optim.SGD([gate, up, down], 0.5), []

    def forward() -> torch.Tensor:
        given = torch.from_numpy(x)
        return torch.nn.functional.silu(given @ gate) * (given @ up) @ down

    for _ in found:
        loss = (forward() - torch.from_numpy(target)).square().mean()
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(y, forward().detach(), rtol=1e-3, atol=1e-4)


def test_linear_attention_and_its_convolution_train(tmp_path: Path) -> None:
    held = {n: weight(8, 8) for n in "qkvo"} | {"g": weight(8, 2), "kernel": weight(8, 1, 3)}
    nodes = [
        helper.make_node("Transpose", ["x"], ["channels"], perm=[0, 2, 1]),
        helper.make_node("CausalConvWithState", ["channels", "kernel"], ["moved", "tail"], activation="silu"),
        helper.make_node("Transpose", ["moved"], ["h"], perm=[0, 2, 1]),
        *(helper.make_node("MatMul", ["h", name], [f"h{name}"]) for name in "qkvg"),
        helper.make_node("Sigmoid", ["hg"], ["beta"]),
        helper.make_node("Log", ["beta"], ["decay"]),
        helper.make_node(
            "LinearAttention", ["hq", "hk", "hv", "", "decay", "beta"], ["read", "state"], q_num_heads=2, kv_num_heads=2
        ),
        helper.make_node("MatMul", ["read", "o"], ["y"]),
    ]
    x, target = weight(2, 5, 8), weight(2, 5, 8)
    made = model(27, nodes, held, "batch", "length", 8)
    before = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]
    found, y = losses(tmp_path, made, OptimType.AdamW, 0.02, 20, x, target)
    np.testing.assert_allclose(found[0], ((before - target) ** 2).mean(), rtol=1e-4)
    assert ((y - target) ** 2).mean() < found[-1] < 0.8 * found[0]
