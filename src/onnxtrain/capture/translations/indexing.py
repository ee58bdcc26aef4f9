"""Calls that torch.onnx would translate to something else than torch computes; they stay whole."""

from __future__ import annotations

import torch

from onnxtrain.capture.translations import whole

aten = torch.ops.aten


@whole(aten.scatter_reduce.two)
def is_mean_or_without_self(node: torch.fx.Node) -> bool:
    """ScatterElements knows no mean, and always takes the value that is there into account."""
    return node.args[4] == "mean" or not node.kwargs.get("include_self", True) or is_scalar(node)


@whole(aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.gather.default)
def is_scalar(node: torch.fx.Node) -> bool:
    """ONNX's gather and scatter have no form for tensors without dimensions."""
    return any(n.meta["val"].dim() == 0 for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))


@whole(aten.index_fill.int_Tensor, aten.diagonal_scatter.default)
def is_filled_by_a_tensor(node: torch.fx.Node) -> bool:
    """Taken apart, a value filled in twice gets the gradient of one place, and a diagonal is written in place."""
    return True
