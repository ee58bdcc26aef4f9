"""Functions whose formula in torch.onnx overflows or cancels where torch's does not; they stay whole."""

from __future__ import annotations

import torch

from onnxtrain.capture.translations import whole

aten = torch.ops.aten


@whole(aten.special_log_ndtr.default)
def has_tails(node: torch.fx.Node) -> bool:
    """The formula is the logarithm of a distribution function that has become 0 in its tail."""
    return True
