"""Training artifacts, trained by onnxruntime, without PyTorch."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import model
import numpy as np
import onnxruntime

from onnxtrain import api, artifacts

assert importlib.util.find_spec("torch") is None
model.write("model.onnx")
artifacts.generate_artifacts(
    "model.onnx",
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="run",
)
state = api.CheckpointState.load_checkpoint("run/checkpoint")
module = api.Module("run/training_model.onnx", state, "run/eval_model.onnx")
optimizer = api.Optimizer("run/optimizer_model.onnx", module)
optimizer.set_learning_rate(0.03)
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
labels = x[:, :3].argmax(1)
losses = []
for _ in range(60):
    losses.append(float(module(x, labels)))
    optimizer.step()
    module.lazy_reset_grad()
assert losses[-1] < 0.3 * losses[0], losses
print(f"onnxruntime {onnxruntime.__version__} trains from {losses[0]:.2f} to {losses[-1]:.2f}")
