"""Functions whose formula in torch.onnx is less exact than torch's; they stay whole."""

from __future__ import annotations

import torch

from onnxtrain.capture.translations import whole

aten = torch.ops.aten


@whole(aten.special_log_ndtr.default)
def has_tails(node: torch.fx.Node) -> bool:
    """The formula is the logarithm of a distribution function that has become 0 in its tail."""
    return True


@whole(aten.selu.default, aten.celu.default, aten.hardsigmoid.default)
def has_numbers_in_double(node: torch.fx.Node) -> bool:
    """The numbers of the formula are attributes, and ONNX keeps these in float32."""
    return node.meta["val"].dtype == torch.float64
