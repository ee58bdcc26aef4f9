"""DeepSpeed's ZeRO stage 3 around ORTModule, under the name that scripts for onnxruntime-training call."""

from __future__ import annotations

import functools
from typing import Any

from onnxtrain.utils.hooks.manager import GlobalSubscriberManager
from onnxtrain.utils.hooks.statistics import StatisticsSubscriber
from onnxtrain.zero_stage3 import configure_zero_stage3


def configure_ort_compatible_zero_stage3(
    debug: bool = False, stats_output_dir: str = "./", stats_overwrite: bool = False
) -> None:
    """Have DeepSpeed's stage 3 gather the parameters of each ORTModule as a whole; before ``deepspeed.initialize``.

    It is done by itself where DeepSpeed was imported before the ORTModule was made.

    Args:
        debug: whether to write statistics of all activations of the next model, as ``StatisticsSubscriber`` does.
        stats_output_dir: where to.
        stats_overwrite: whether into a folder that exists.

    Raises:
        ModuleError: DeepSpeed is not installed, or another one than is known.
    """
    offload = configure_zero_stage3()
    if not debug:
        return
    original = offload.setup_zero_stage3_hooks

    @functools.wraps(original)
    def setup(self: Any) -> Any:
        offload.setup_zero_stage3_hooks = original
        statistics = StatisticsSubscriber(stats_output_dir, override_output_dir=stats_overwrite)
        GlobalSubscriberManager.subscribe(self.module, [statistics])
        return original(self)

    offload.setup_zero_stage3_hooks = setup
