"""Parameters in shards of DeepSpeed's ZeRO stage 3, which its hooks gather around the forward pass of each module.

An ORTModule runs a graph in the place of the modules within it, so it is the one whose hooks gather what they own:
parameters are registered as its own ("external" to it in DeepSpeed's words), and nothing within it gets hooks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import Any

import torch

from onnxtrain.errors import ModuleError

HOLDS_ALL = "_ort_holds_all"  # attribute of a class of modules whose forward pass calls none of those within
BOOKKEEPING = (  # attributes that DeepSpeed sets on a module whose hooks gather, and looks up in its ``__dict__``
    *("ds_id", "ds_recompute_parameters", "ds_grads_remaining", "ds_inflight_param_registry", "ds_model_granularity"),
    *("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt"),
    *("_external_params", "ds_external_parameters", "all_parameters", "_original_parameters"),
)
_REGISTER = "_register_deepspeed_module"


def is_of_deepspeed(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed gathers it, and gives it back."""
    return hasattr(tensor, "ds_status")


def configure_where_loaded() -> None:
    """Configure stage 3 where the program has imported a DeepSpeed that is known; who uses another stage needs none."""
    if "deepspeed" in sys.modules:
        with contextlib.suppress(ModuleError):
            configure_zero_stage3()


def configure_zero_stage3() -> Any:
    """Have DeepSpeed gather for each ORTModule the parameters of all modules within it; once is enough.

    Returns:
        DeepSpeed's class that puts hooks on modules.

    Raises:
        ModuleError: DeepSpeed is not installed, or another one than is known.
    """
    try:
        offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
        external = importlib.import_module("deepspeed.runtime.zero.partition_parameters").register_external_parameter
        original = getattr(offload, _REGISTER)
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules.get("deepspeed"), "__version__", "that is not installed")
        raise ModuleError(
            f"ZeRO stage 3 cannot be set up with a DeepSpeed {version}: {error}",
            cure="install deepspeed 0.19; or use stage 1 or 2, which need nothing",
        ) from error
    if not hasattr(original, HOLDS_ALL):
        setattr(offload, _REGISTER, _holding(original, external))
    return offload


def _holding(original: Any, external: Any) -> Any:
    """DeepSpeed's function that puts hooks on a module and those within it, which stops at one that holds all."""

    @functools.wraps(original)
    def register(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(module), HOLDS_ALL):
            return original(self, module, *args, **kwargs)
        vars(module)["children"] = lambda: iter(())
        try:
            return original(self, module, *args, **kwargs)
        finally:
            del vars(module)["children"]
            for parameter in module.parameters():
                external(module, parameter)

    setattr(register, HOLDS_ALL, True)
    return register
