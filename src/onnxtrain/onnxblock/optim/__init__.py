"""Optimizers: parameters in, a model out that takes gradients and gives new parameters and states.

The model's inputs are ``learning_rate`` (float32 scalar), ``step`` (int64 scalar, updates done so far), and for each
parameter ``p`` its value ``p``, its gradient ``p_grad``, and its states, such as ``p.exp_avg``. Whatever an input X
becomes is the output ``X.out``. Each old value is read only by nodes that its new value depends on, so a runtime may
write the new over the old whatever the order in which it runs the nodes (``api.Optimizer`` checks that and does it).
"""

from onnxtrain.onnxblock.optim.adafactor import Adafactor
from onnxtrain.onnxblock.optim.adam import Adam, AdamW
from onnxtrain.onnxblock.optim.lion import Lion
from onnxtrain.onnxblock.optim.optimizer import ClipGradNorm, Optimizer, Slot
from onnxtrain.onnxblock.optim.sgd import SGD

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "ClipGradNorm", "Lion", "Optimizer", "Slot"]
