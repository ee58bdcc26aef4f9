"""Gradients of pooling."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.gradient.rules.convolution import run_time_pads
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.shape_rules.convolution import window_of

Value = ir.Value


@gradient("MaxPool")
def max_pool(ctx: Context, dy: Value, x: Value, *, storage_order: int = 0, **_: Any) -> Any:
    """dy at the places that the forward pass's Indices output names; column-major ones are found again row-major."""
    op, indices = ctx.op, ctx.output(1)
    if storage_order:
        stated = {name: a.value for name, a in ctx.node.attributes.items()}
        _, indices = op.MaxPool(x, outputs=2, **{**stated, "storage_order": 0})
    return op.MaxPoolGrad(dy, indices, op.shape(x))


@gradient("AveragePool")
def average_pool(ctx: Context, dy: Value, x: Value, *, count_include_pad: int = 0, **_: Any) -> Any:
    """One AveragePoolGrad node."""
    pads, places = _padding(ctx, x)
    return ctx.op.AveragePoolGrad(dy, ctx.op.shape(x), pads, count_include_pad=count_include_pad, **places)


def _padding(ctx: Context, x: Value) -> tuple[Value, dict[str, Any]]:
    """The padding as an operand, as SAME_* may know it only at run time, and the rest of the window as attributes."""
    window = window_of(ctx.node, ())
    fixed = window.fixed_pads(shapes.known_dims(x)[2:])
    pads = run_time_pads(ctx.op, x, window) if fixed is None else ctx.op.ints(*fixed)
    return pads, {"kernel_shape": window.kernel, "strides": window.strides, "dilations": window.dilations}


@gradient("LpPool")
def lp_pool(ctx: Context, dy: Value, x: Value, *, p: int = 2, **_: Any) -> Any:
    """The norm's slope at x, times the sum of dy · y^(1 - p) over the windows that x is in; 0 where y is 0."""
    op = ctx.op
    pads, places = _padding(ctx, x)
    return _slope(op, x, p) * op.SumPoolGrad(_share(op, dy, ctx.y, p), op.shape(x), pads, **places)


@gradient("GlobalLpPool")
def global_lp_pool(ctx: Context, dy: Value, x: Value, *, p: int = 2) -> Any:
    """The norm's slope at x, times dy · y^(1 - p); 0 where y is 0."""
    return _slope(ctx.op, x, p) * _share(ctx.op, dy, ctx.y, p)


def _slope(op: Builder, x: Value, p: int) -> Value:
    """The derivative of |x|^p / p."""
    if p == 1:
        return op.Sign(x)
    return x if p == 2 else op.Sign(x) * op.Pow(op.Abs(x), op.like(float(p - 1), x))


def _share(op: Builder, dy: Value, y: Value, p: int) -> Value:
    """dy · y^(1 - p), and 0 where y is 0."""
    if p == 1:
        return dy
    zero = op.like(0.0, y)
    empty = op.Equal(y, zero)
    power = op.Pow(op.Where(empty, op.like(1.0, y), y), op.like(float(1 - p), y))
    return op.Where(empty, zero, dy * power)


@gradient("MaxUnpool")
def max_unpool(ctx: Context, dy: Value, x: Value, indices: Value, shape: Value | None = None, **_: Any) -> Any:
    """dy read at the indices, which count through the whole result."""
    return ctx.op.Gather(ctx.op.Reshape(dy, ctx.op.ints(-1)), indices, axis=0)


@gradient("GlobalAveragePool")
def global_average_pool(ctx: Context, dy: Value, x: Value) -> Any:
    """dy divided by the number of elements of each mean, expanded."""
    op = ctx.op
    count = op.cast(op.share(x, ctx.y), shapes.dtype_of(dy))
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
