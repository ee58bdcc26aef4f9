"""Train PyTorch modules and ONNX models as one optimized graph."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ORTModule": "onnxtrain.ortmodule",
    "DebugOptions": "onnxtrain.ortmodule",
    "LogLevel": "onnxtrain.ortmodule",
    "ModuleWithLoss": "onnxtrain.ortmodule",
    "verify": "onnxtrain.ortmodule",
    "check": "onnxtrain.ortmodule",
    "check_model": "onnxtrain.blockers",
    "Cluster": "onnxtrain.cluster",
    "dequantize_weights": "onnxtrain.quantized_weights",
    "gradient_graph": "onnxtrain.gradient_graphs",
    "lora": "onnxtrain.adapters",
    "merge_lora": "onnxtrain.adapters",
    "adapter_inputs": "onnxtrain.adapters",
    "save_adapter": "onnxtrain.adapters",
    "register_gradient": "onnxtrain.gradient",
    "register_custom_stop_gradient_edges": "onnxtrain.gradient",
    "Options": "onnxtrain.options",
    "PropagateCastOpsStrategy": "onnxtrain.options",
    "OnnxTrainError": "onnxtrain.errors",
}
_MODULES = ("optim",)  # those of public names that need torch
__all__ = ["__version__", "is_ortmodule_available", *_MODULES, *_PUBLIC]


def is_ortmodule_available() -> bool:
    """Whether ORTModule can be used here: whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use, so that importing onnxtrain needs no torch."""
    if name in _MODULES:
        return importlib.import_module(f"onnxtrain.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'onnxtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
