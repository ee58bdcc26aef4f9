"""Gradients of operators on rows without padding."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient

Value = ir.Value


@gradient("ShrunkenGather", domain=DOMAIN)
def shrunken_gather(ctx: Context, dy: Value, x: Value, indices: Value) -> Any:
    """The rows of dy at their indices, zeros in the others: no index occurs twice."""
    return ctx.op.ShrunkenGatherGrad(dy, indices, ctx.op.shape(x))


@gradient("FlattenAndUnpad", domain=DOMAIN)
def flatten_and_unpad(ctx: Context, dy: Value, x: Value, rows: Value) -> Any:
    """The rows back in their places, zeros in the others."""
    return ctx.op.PadAndUnflatten(dy, rows, ctx.op.Shape(x, start=0, end=2))


@gradient("PadAndUnflatten", domain=DOMAIN)
def pad_and_unflatten(ctx: Context, dy: Value, x: Value, rows: Value, shape: Value) -> Any:
    """The rows of dy."""
    return ctx.op.FlattenAndUnpad(dy, rows)
