"""ORTModule: wrap an ``nn.Module``, keep the training loop."""

from onnxtrain import is_ortmodule_available
from onnxtrain.capture import register_custom_function_schema_supplementary
from onnxtrain.engine.comparison import Comparison, Report
from onnxtrain.engine.randomness import override_torch_manual_seed, set_seed
from onnxtrain.optimize.registered import register_graph_optimizer, unregister_graph_optimizer
from onnxtrain.ortmodule.debug import DebugOptions, LogLevel
from onnxtrain.ortmodule.fallback import ORTModuleFallbackException, ORTModuleInitException
from onnxtrain.ortmodule.module import ORTModule
from onnxtrain.ortmodule.readiness import check
from onnxtrain.ortmodule.trial import verify
from onnxtrain.ortmodule.with_loss import ModuleWithLoss

__all__ = [
    "Comparison",
    "DebugOptions",
    "LogLevel",
    "ModuleWithLoss",
    "ORTModule",
    "ORTModuleFallbackException",
    "ORTModuleInitException",
    "Report",
    "check",
    "is_ortmodule_available",
    "override_torch_manual_seed",
    "register_custom_function_schema_supplementary",
    "register_graph_optimizer",
    "set_seed",
    "unregister_graph_optimizer",
    "verify",
]
