"""DeepSpeed's ZeRO stage 3 around ORTModule, under the name that scripts for onnxruntime-training call."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from onnxtrain.errors import ModuleError
from onnxtrain.utils.hooks.manager import GlobalSubscriberManager
from onnxtrain.utils.hooks.statistics import StatisticsSubscriber
from onnxtrain.utils.hooks.subscriber import SubscriberBase


class ZeROOffloadSubscriber(SubscriberBase):
    """Nothing: what gathered layers around the predecessor's graphs, as the programs of a graph do now.

    Args:
        offloader: DeepSpeed's ``DeepSpeedZeRoOffload``.
        one_time_init: what the predecessor had learned of it.
        enable_debug: nothing is printed.
    """

    def __init__(self, offloader: object = None, one_time_init: object = None, enable_debug: bool = False) -> None:
        super().__init__()


def configure_ort_compatible_zero_stage3(
    debug: bool = False, stats_output_dir: str = "./", stats_overwrite: bool = False
) -> None:
    """Nothing that stage 3 needs, which works as it is: the programs of an ORTModule call DeepSpeed's coordinator.

    Args:
        debug: whether to write statistics of all activations of the next model that ``deepspeed.initialize`` is given,
            as ``StatisticsSubscriber`` does.
        stats_output_dir: where to.
        stats_overwrite: whether into a folder that exists.

    Raises:
        ModuleError: DeepSpeed is not installed, or another one than is known.
    """
    try:
        offload: Any = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
        original = offload.setup_zero_stage3_hooks
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules.get("deepspeed"), "__version__", "that is not installed")
        raise ModuleError(
            f"ZeRO stage 3 cannot be set up with a DeepSpeed {version}: {error}",
            cure="install deepspeed 0.19; or use stage 1 or 2, which need nothing",
        ) from error
    if not debug:
        return

    @functools.wraps(original)
    def setup(self: Any) -> Any:
        offload.setup_zero_stage3_hooks = original
        statistics = StatisticsSubscriber(stats_output_dir, override_output_dir=stats_overwrite)
        GlobalSubscriberManager.subscribe(self.module, [statistics])
        return original(self)

    offload.setup_zero_stage3_hooks = setup
