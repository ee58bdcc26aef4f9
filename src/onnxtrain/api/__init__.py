"""Training the artifacts of ``generate_artifacts`` with the ordinary onnxruntime; no torch.

state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", module)
for x, labels in batches:
loss = module(x, labels)
optimizer.step()
module.lazy_reset_grad()
CheckpointState.save_checkpoint(state, "checkpoint", include_optimizer_state=True)
module.export_model_for_inferencing("model.onnx", ["scores"])
"""

from onnxtrain.api.checkpoint_state import CheckpointState, Parameter, Parameters, Properties
from onnxtrain.api.lr_scheduler import (
    ConstantLRScheduler,
    CosineLRScheduler,
    LinearLRScheduler,
    LRScheduler,
    OneCycleLRScheduler,
    PolynomialLRScheduler,
)
from onnxtrain.api.module import Module
from onnxtrain.api.optimizer import Optimizer

__all__ = [
    "CheckpointState",
    "ConstantLRScheduler",
    "CosineLRScheduler",
    "LRScheduler",
    "LinearLRScheduler",
    "Module",
    "OneCycleLRScheduler",
    "Optimizer",
    "Parameter",
    "Parameters",
    "PolynomialLRScheduler",
    "Properties",
]
