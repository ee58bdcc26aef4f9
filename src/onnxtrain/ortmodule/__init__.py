"""ORTModule: wrap an ``nn.Module``, keep the training loop."""

from onnxtrain.ortmodule.debug import DebugOptions, LogLevel
from onnxtrain.ortmodule.module import ORTModule
from onnxtrain.ortmodule.verification import Comparison, Report, verify

__all__ = ["Comparison", "DebugOptions", "LogLevel", "ORTModule", "Report", "verify"]
