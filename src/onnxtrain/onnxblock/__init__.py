"""Composing losses, training models and optimizers from blocks; no torch.

with onnxblock.base("model.onnx"):
block = MyTrainingBlock()           # a subclass of TrainingBlock whose build returns the loss
block.requires_grad("head.*")
block("scores")
training_model, eval_model = block.to_model_proto()
trainable, frozen = block.parameters()
optimizer = onnxblock.optim.AdamW()
with onnxblock.empty_base():
optimizer(trainable)
optimizer_model = optimizer.to_model_proto()
onnxblock.save_checkpoint((trainable, frozen), "checkpoint")
"""

from onnxtrain.onnxblock import blocks, loss, optim
from onnxtrain.onnxblock.base import base, custom_op_library, empty_base
from onnxtrain.onnxblock.blocks import Block
from onnxtrain.onnxblock.saving import load_checkpoint_to_model, save_checkpoint
from onnxtrain.onnxblock.training import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
