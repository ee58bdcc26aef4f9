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


@gradient("PackedDropout", domain=DOMAIN)
def packed_dropout(ctx: Context, dy: Value, x: Value, ratio: Value) -> Any:
    """dx = dy · mask / (1 - ratio)."""
    return ctx.op.DropoutGrad(dy, ctx.output(1), ratio)


@gradient("FlattenAndUnpad", domain=DOMAIN)
def flatten_and_unpad(ctx: Context, dy: Value, x: Value, rows: Value) -> Any:
    """The rows back in their places, zeros in the others."""
    return ctx.op.PadAndUnflatten(dy, rows, ctx.op.Shape(x, start=0, end=2))


@gradient("PadAndUnflatten", domain=DOMAIN)
def pad_and_unflatten(ctx: Context, dy: Value, x: Value, rows: Value, shape: Value) -> Any:
    """The rows of dy."""
    return ctx.op.FlattenAndUnpad(dy, rows)


@gradient("PackedAttention", domain=DOMAIN)
def packed_attention(
    ctx: Context,
    dy: Value,
    q: Value,
    k: Value,
    v: Value,
    q_rows: Value,
    k_rows: Value,
    q_shape: Value,
    k_shape: Value,
    mask: Value | None = None,
    *,
    scale: float = 1.0,
    ratio: float = 0.0,
    causal: int = 0,
) -> Any:
    """The weights computed again, from the log of the sum of exponentials where none is dropped; the mask gets none."""
    ctx.first_output_only()
    known = (None, None, ctx.output(2)) if ratio else (ctx.y, ctx.output(1), None)
    given = (q, k, v, q_rows, k_rows, q_shape, k_shape, mask, *known)
    return ctx.op.PackedAttentionGrad(dy, *given, scale=scale, ratio=ratio, causal=causal, outputs=3)
