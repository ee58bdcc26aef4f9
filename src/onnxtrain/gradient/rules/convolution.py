"""Gradients of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.shape_rules.convolution import Window, window_of

Value = ir.Value


@gradient("Conv")
def conv(ctx: Context, dy: Value, x: Value, w: Value, b: Value | None = None, **_: Any) -> Any:
    """One ConvGrad node; padding whose size is known only at run time is made explicit around it."""
    window = window_of(ctx.node, shapes.known_dims(w)[2:])
    group = shapes.attribute(ctx.node, "group", 1)
    pads = window.fixed_pads(shapes.known_dims(x)[2:])
    if pads is not None:
        return _conv_grad(ctx.op, dy, x, w, window, pads, group, 2 if b is None else 3)
    op = ctx.op
    around = spread_pads(op, run_time_pads(op, x, window, w))
    padded = op.Pad(x, around, op.like(0.0, x))
    dx, *rest = _conv_grad(op, dy, padded, w, window, (0,) * (2 * len(window.kernel)), group, 2 if b is None else 3)
    return op.Pad(dx, op.Neg(around), op.like(0.0, dx)), *rest


def _conv_grad(
    op: Builder, dy: Value, x: Value, w: Value, window: Window, pads: Sequence[int], group: int, outputs: int
) -> tuple[Value, ...]:
    places: dict[str, Any] = {"strides": window.strides, "pads": tuple(pads), "dilations": window.dilations}
    return op.ConvGrad(dy, x, w, outputs=outputs, group=group, **places)


def run_time_pads(op: Builder, x: Value, window: Window, w: Value | None = None) -> Value:
    """The elements that SAME_* adds, before each spatial axis and then after each, as a vector."""
    steps, zero = op.ints(*window.strides), op.ints(0)
    sizes = op.Shape(x, start=2)
    places = op.Div(op.Add(sizes, op.ints(*(s - 1 for s in window.strides))), steps)
    used = op.Add(op.Mul(op.Sub(places, op.ints(1)), steps), _reach(op, window, w))
    total = op.Max(op.Sub(used, sizes), zero)
    small = op.Div(total, op.ints(2))
    large = op.Sub(total, small)
    pair = (small, large) if window.auto_pad == "SAME_UPPER" else (large, small)
    return op.Concat(*pair, axis=0)


def _reach(op: Builder, window: Window, w: Value | None) -> Value:
    """Elements from the first to the last of the kernel ``w``, along each axis, as a vector."""
    if window.is_known or w is None:
        return op.ints(*window.reach)
    one = op.ints(1)
    return op.Add(op.Mul(op.Sub(op.Shape(w, start=2), one), op.ints(*window.dilations)), one)


def spread_pads(op: Builder, pads: Value) -> Value:
    """Pads of the spatial axes as pads of all axes."""
    before, after = op.Split(pads, axis=0, outputs=2, num_outputs=2)
    none = op.ints(0, 0)
    return op.Concat(none, before, none, after, axis=0)


@gradient("ConvTranspose")
def conv_transpose(
    ctx: Context, dy: Value, x: Value, w: Value, b: Value | None = None, *, output_shape: Any = None, **_: Any
) -> Any:
    """dx is the convolution of dy; dw that convolution's own weight gradient, with x in the place of its dy.

    Where the padding is not plain, dy is first put back into the whole result, of which it is a part.
    """
    op = ctx.op
    window = window_of(ctx.node, shapes.known_dims(w)[2:])
    group, count = shapes.attribute(ctx.node, "group", 1), len(window.kernel)
    extra = tuple(shapes.attribute(ctx.node, "output_padding") or (0,) * count)
    pads, whole = window.pads, dy
    if pads is None and window.is_known and any(r < s for r, s in zip(window.reach, window.strides, strict=True)):
        raise ctx.unsupported("the gradient of ConvTranspose with auto_pad and steps longer than the kernel")
    if output_shape or pads is None or any(extra) or min(pads) < 0:
        if not window.is_known:
            raise ctx.unsupported("the gradient of ConvTranspose with a kernel whose size is known only at run time")
        whole = op.Pad(dy, spread_pads(op, _cut(op, x, window, extra, output_shape)), op.like(0.0, dy))
        pads = (0,) * (2 * count)
    places: dict[str, Any] = {"strides": window.strides, "pads": pads, "dilations": window.dilations}
    dx = op.Conv(whole, w, group=group, **places)
    dw = _conv_grad(op, x, whole, w, window, pads, group, 2)[1]
    db = op.ReduceSum(dy, op.ints(0, *range(2, shapes.rank(dy))), keepdims=0)
    return dx, dw, db


def _cut(op: Builder, x: Value, window: Window, extra: Sequence[int], wanted: Sequence[int] | None) -> Value:
    """What a transposed convolution cuts from its whole result, before each axis and then after each, as a vector."""
    if wanted is None and window.pads is not None:
        count = len(extra)
        return op.ints(*window.pads[:count], *(p - e for p, e in zip(window.pads[count:], extra, strict=True)))
    if wanted is None:
        fixed = (e + r - s for e, r, s in zip(extra, window.reach, window.strides, strict=True))
        total = op.ints(*fixed)
    else:
        fixed = zip(extra, window.reach, window.strides, tuple(wanted)[-len(extra) :], strict=True)
        rest = op.ints(*(e + r - s - n for e, r, s, n in fixed))
        total = op.Add(op.Mul(op.Shape(x, start=2), op.ints(*window.strides)), rest)
    small = op.Div(total, op.ints(2))
    large = op.Sub(total, small)
    before, after = (small, large) if window.auto_pad == "SAME_UPPER" else (large, small)
    return op.Concat(before, op.Sub(after, op.ints(*extra)), axis=0)
