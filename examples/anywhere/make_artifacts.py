"""Training artifacts of a small convolutional network, data to train it on, and the losses that Python gets.

No torch: the network is written in ONNX's own text. ``node.mjs`` and ``index.html`` train the same files elsewhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, generate_artifacts

NETWORK = """
<ir_version: 10, opset_import: ["" : 20]>
digits (float[rows, 1, 8, 8] images) => (float[rows, 10] scores) {
    wide = Conv<pads = [1, 1, 1, 1]>(images, conv1_weight, conv1_bias)
    normed = BatchNormalization<training_mode = 0>(wide, norm_scale, norm_bias, norm_mean, norm_var)
    first = Relu(normed)
    small = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(first, conv2_weight, conv2_bias)
    second = Gelu(small)
    flat = Flatten(second)
    scores = Gemm<transB = 1>(flat, head_weight, head_bias)
}
"""
SIZES = {
    "conv1_weight": (8, 1, 3, 3),
    "conv1_bias": (8,),
    "norm_scale": (8,),
    "norm_bias": (8,),
    "norm_mean": (8,),
    "norm_var": (8,),
    "conv2_weight": (16, 8, 3, 3),
    "conv2_bias": (16,),
    "head_weight": (10, 256),
    "head_bias": (10,),
}
ONES = {"norm_scale", "norm_var"}
HELD_OUT = 197  # rows that are not trained on


def build_network(seed: int = 0) -> onnx.ModelProto:
    """The network with random weights: ``images`` [rows, 1, 8, 8] to ``scores`` [rows, 10]."""
    random = np.random.default_rng(seed)
    model = onnx.parser.parse_model(NETWORK)
    for name, size in SIZES.items():
        if len(size) > 1:
            content = random.standard_normal(size) / np.sqrt(np.prod(size[1:]))
        else:
            content = np.full(size, name in ONES)
        model.graph.initializer.append(onnx.numpy_helper.from_array(content.astype(np.float32), name))
    return model


def load_data() -> dict[str, np.ndarray]:
    """Inputs of the training model by name: ``images`` float32 [1797, 1, 8, 8], ``labels`` int64 [1797]."""
    digits = load_digits()
    images = (digits.images[:, None] / 16 - 0.5).astype(np.float32)
    return {"images": images, "labels": digits.target.astype(np.int64)}


def batches(data: dict[str, np.ndarray], steps: int, rows: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches in the order of the data, from its beginning again where it ends; the last rows are held out."""
    whole = (len(data["labels"]) - HELD_OUT) // rows
    for step in range(steps):
        first = step % whole * rows
        yield data["images"][first : first + rows], data["labels"][first : first + rows]


def train(folder: Path, data: dict[str, np.ndarray], run: dict[str, Any]) -> tuple[dict[str, Any], CheckpointState]:
    """Train the artifacts as ``run`` says: what was measured, and the state afterwards."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(run["rate"])
    losses = []
    for images, labels in batches(data, run["steps"], run["rows"]):
        loss, _ = module(images, labels)
        losses.append(float(loss))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    loss, scores = module(data["images"][-HELD_OUT:], data["labels"][-HELD_OUT:])
    right = int(np.sum(scores.argmax(-1) == data["labels"][-HELD_OUT:]))
    return {"losses": losses, "heldOutLoss": float(loss), "right": right}, state


def make(folder: Path, steps: int = 100, rows: int = 64, rate: float = 2e-3) -> dict[str, Any]:
    """Write artifacts, ``data.safetensors`` and ``run.json``, which says how to train and what Python's losses are."""
    generate_artifacts(
        build_network(),
        loss=LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.AdamW(weight_decay=0.01),
        artifact_directory=folder,
        additional_output_names=["scores"],
        batch_statistics=True,
    )
    data = load_data()
    save_file(data, folder / "data.safetensors")
    run: dict[str, Any] = {"steps": steps, "rows": rows, "rate": rate, "heldOut": HELD_OUT}
    run["python"], _ = train(folder, data, run)
    (folder / "run.json").write_text(json.dumps(run))
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    python = make(arguments.folder, arguments.steps)["python"]
    print(f"{arguments.folder}: Python's loss falls from {python['losses'][0]:.3f} to {python['losses'][-1]:.3f}")
