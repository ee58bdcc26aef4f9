"""Norms of vectors."""

from __future__ import annotations

import math
from typing import Any

import torch

from onnxtrain.capture.translations import standard, translation, whole

aten = torch.ops.aten


@translation(aten.linalg_vector_norm.default)
def vector_norm(x, ord=2.0, dim=None, keepdim=False):
    """One reduction; over all axes where none are named, which torch.onnx makes a tensor without them."""
    op, axes = standard(), () if not dim else (standard().Constant(value_ints=list(dim)),)
    if math.isinf(ord):
        return (op.ReduceMax if ord > 0 else op.ReduceMin)(op.Abs(x), *axes, keepdims=int(keepdim))
    return (op.ReduceL2 if ord == 2 else op.ReduceL1)(x, *axes, keepdims=int(keepdim))


@whole(aten.linalg_vector_norm.default)
def is_of_another_order(node: torch.fx.Node) -> bool:
    """Powers have no gradient at zero where torch's norm has one; and numbers are no vectors."""
    order: Any = node.args[1] if len(node.args) > 1 else 2.0
    scalar = node.args[0].meta["val"].dim() == 0  # type: ignore[union-attr]
    return scalar or bool(node.kwargs.get("dtype")) or order not in (1, 2, math.inf, -math.inf)
