"""Gradients of pooling."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.gradient.rules.convolution import run_time_pads
from onnxtrain.ir import shapes
from onnxtrain.ir.shape_rules.convolution import window_of

Value = ir.Value


@gradient("MaxPool")
def max_pool(ctx: Context, dy: Value, x: Value, *, storage_order: int = 0, **_: Any) -> Any:
    """dy at the places that the forward pass's Indices output names."""
    if storage_order:
        raise ctx.unsupported("the gradient of MaxPool with column-major indices")
    return ctx.op.MaxPoolGrad(dy, ctx.output(1), ctx.op.shape(x))


@gradient("AveragePool")
def average_pool(ctx: Context, dy: Value, x: Value, *, count_include_pad: int = 0, **_: Any) -> Any:
    """One AveragePoolGrad node, with the padding as an operand: SAME_* may know it only at run time."""
    op = ctx.op
    window = window_of(ctx.node, ())
    fixed = window.fixed_pads(shapes.known_dims(x)[2:])
    return op.AveragePoolGrad(
        dy,
        op.shape(x),
        run_time_pads(op, x, window) if fixed is None else op.ints(*fixed),
        kernel_shape=window.kernel,
        strides=window.strides,
        dilations=window.dilations,
        count_include_pad=count_include_pad,
    )


@gradient("GlobalAveragePool")
def global_average_pool(ctx: Context, dy: Value, x: Value) -> Any:
    """dy divided by the number of elements of each mean, expanded."""
    op = ctx.op
    count = op.cast(op.Div(op.Size(x), op.Size(ctx.y)), shapes.dtype_of(dy))
    return op.Expand(dy / count, op.shape(x))


@gradient("GlobalMaxPool")
def global_max_pool(ctx: Context, dy: Value, x: Value) -> Any:
    """dy at the first maximum of each channel."""
    op = ctx.op
    planes = op.Reshape(x, op.ints(0, 0, -1))
    first = op.ArgMax(planes, axis=2, keepdims=1)
    zeros = op.Expand(op.like(0.0, x), op.shape(planes))
    placed = op.ScatterElements(zeros, first, op.Reshape(dy, op.ints(0, 0, 1)), axis=2)
    return op.Reshape(placed, op.shape(x), allowzero=1)
