"""Names of inputs and outputs of the artifacts: what a program in any language goes by.

An output ``X.out`` is what the input X becomes. The training model takes each weight under its own name, and its
gradients so far; the optimizer model takes weights, gradients and states.
"""

from __future__ import annotations

RESET = "lazy_reset_grad"  # bool input of the training model: true drops the gradients so far
LEARNING_RATE = "learning_rate"  # float32 input of the optimizer model
STEP = "step"  # int64 input of the optimizer model: updates done so far


def updated(name: str) -> str:
    """The output that holds what an input becomes."""
    return f"{name}.out"


def accumulation(parameter: str) -> tuple[str, str]:
    """The training model's input and output for the gradient of a parameter, summed since the last reset."""
    return f"{parameter}_grad.accumulation.buffer", f"{parameter}_grad.accumulation.out"


def gradient(parameter: str) -> str:
    """The optimizer model's input for the gradient of a parameter."""
    return f"{parameter}_grad"
