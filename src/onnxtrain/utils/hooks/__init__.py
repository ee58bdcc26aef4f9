"""Watch what passes through a model, in eager PyTorch and in ORTModule alike, and find where they part."""

from onnxtrain.utils.hooks.manager import GlobalSubscriberManager, SubscriberManager, inspect_activation
from onnxtrain.utils.hooks.statistics import StatisticsSubscriber
from onnxtrain.utils.hooks.subscriber import RuntimeStates, SubscriberBase
from onnxtrain.utils.hooks.subscription import Subscription
from onnxtrain.utils.hooks.zero_stage3 import ZeROOffloadSubscriber, configure_ort_compatible_zero_stage3

__all__ = [
    "GlobalSubscriberManager",
    "RuntimeStates",
    "StatisticsSubscriber",
    "SubscriberBase",
    "SubscriberManager",
    "Subscription",
    "ZeROOffloadSubscriber",
    "configure_ort_compatible_zero_stage3",
    "inspect_activation",
]
