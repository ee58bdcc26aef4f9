"""What frameworks load of onnxtrain."""

from onnxtrain.integrations.trainer import TrainerCallback

__all__ = ["TrainerCallback"]
