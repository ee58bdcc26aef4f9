"""DebugOptions and LogLevel in a module of the name that ``onnxruntime.training.ortmodule`` had; and Options."""

from onnxtrain.options import Options
from onnxtrain.ortmodule.debug import DebugOptions, LogLevel

__all__ = ["DebugOptions", "LogLevel", "Options"]
