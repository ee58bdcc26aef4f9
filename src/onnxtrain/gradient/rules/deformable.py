"""Gradient of deformable convolution (Dai et al., 2017; Zhu et al., 2019)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.gradient.rules.resampling import grid_gradients
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.functions.codes import GRID_MODES
from onnxtrain.ir.shape_rules.convolution import Window, window_of

Value = ir.Value


@gradient("DeformConv")
def deform_conv(
    ctx: Context,
    dy: Value,
    x: Value,
    w: Value,
    offset: Value,
    b: Value | None = None,
    mask: Value | None = None,
    *,
    group: int = 1,
    offset_group: int = 1,
    **_: Any,
) -> Any:
    """The convolution as samples of x, times a mask, times the weight: the gradients of the three, one after another.

    Samples have shape (batch · offset groups, their channels, places of the kernel · height, width).
    """
    op = ctx.op
    if shapes.rank(x) != 4:
        raise ctx.unsupported("the gradient of a DeformConv that is not of images")
    window = window_of(ctx.node, shapes.known_dims(w)[2:])
    if not window.is_known:
        raise ctx.unsupported("the gradient of DeformConv with a kernel whose size is known only at run time")
    places, inner = window.kernel[0] * window.kernel[1], op.Shape(offset, start=2)
    batch, groups, narrow = op.size(x, 0), op.ints(group), op.size(w, 1)
    planes_of = op.Div(op.Mul(narrow, groups), op.ints(offset_group))
    planes = op.Reshape(x, op.Concat(op.ints(-1), planes_of, op.Shape(x, start=2), axis=0))
    grid = _grid(op, offset, planes, window)
    samples = op.GridSample(planes, grid, mode="linear", padding_mode="zeros", align_corners=0)
    masked, spread = samples, None
    if mask is not None:
        spread = op.Reshape(mask, op.Concat(op.ints(-1, 1), op.Shape(samples, start=2), axis=0))
        masked = samples * spread
    length, taps = op.ReduceProd(inner, keepdims=1), op.Mul(narrow, op.ints(places))
    columns = op.Reshape(masked, op.Concat(batch, groups, taps, length, axis=0))
    wide = op.Div(op.size(w, 0), groups)
    rows = op.Reshape(dy, op.Concat(batch, groups, wide, length, axis=0))
    weight = op.Reshape(w, op.Concat(groups, wide, taps, axis=0))
    dw = op.ReduceSum(op.MatMul(rows, op.transpose(columns)), op.ints(0), keepdims=0)
    dmasked = op.Reshape(op.MatMul(op.transpose(weight), rows), op.Shape(samples))
    dsamples = dmasked if spread is None else dmasked * spread
    dmask = None
    if mask is not None:
        dmask = op.Reshape(op.ReduceSum(dmasked * samples, op.ints(1), keepdims=0), op.shape(mask))
    dplanes, dgrid = grid_gradients(op, dsamples, planes, grid, GRID_MODES["linear"], padding=0, align_corners=0)
    assert dgrid is not None
    db = None if b is None else op.ReduceSum(dy, op.ints(0, 2, 3), keepdims=0)
    dx, dw = op.Reshape(dplanes, op.shape(x)), op.Reshape(dw, op.shape(w))
    return dx, dw, _of_offsets(op, dgrid, offset, planes, places), db, dmask


def _length(op: Builder, x: Value, axis: int) -> Value:
    """The size of an axis as a scalar of x's type."""
    return op.cast(op.Squeeze(op.size(x, axis), op.ints(0)), shapes.dtype_of(x))


def _grid(op: Builder, offset: Value, planes: Value, window: Window) -> Value:
    """Where each place of the kernel reads, for GridSample: (batch · groups, places · height, width, 2)."""
    places, pads = window.kernel[0] * window.kernel[1], window.pads or (0,) * 4
    parts = op.Reshape(offset, op.Concat(op.ints(-1, places, 2), op.Shape(offset, start=2), axis=0))
    made = []
    for axis, moved in enumerate(op.Split(parts, axis=2, outputs=2, num_outputs=2)):
        taps = [k // window.kernel[1] if axis == 0 else k % window.kernel[1] for k in range(places)]
        first = op.constant([[[[t * window.dilations[axis] - pads[axis]]]] for t in taps], ir.DataType.INT64)
        size = op.Squeeze(op.size(offset, 2 + axis), op.ints(0))
        steps = op.Mul(op.Range(op.constant(0), size, op.constant(1)), op.ints(window.strides[axis]))
        at = op.Add(
            op.Reshape(first, op.ints(places, 1, 1, 1)), op.Unsqueeze(steps, op.ints(1)) if axis == 0 else steps
        )
        place = moved + op.cast(at, shapes.dtype_of(planes))
        made.append((place * 2.0 + 1.0) / _length(op, planes, 2 + axis) - 1.0)
    grid = op.Concat(*(op.Unsqueeze(v, op.ints(-1)) for v in reversed(made)), axis=-1)
    return op.Reshape(grid, op.Concat(op.size(planes, 0), op.ints(-1), op.size(offset, 3), op.ints(2), axis=0))


def _of_offsets(op: Builder, dgrid: Value, offset: Value, planes: Value, places: int) -> Value:
    """The grid's gradient as that of the offsets, which count elements, y before x."""
    dx, dy = op.Split(dgrid, axis=3, outputs=2, num_outputs=2)
    scaled = [v * 2.0 / _length(op, planes, axis) for axis, v in ((2, dy), (3, dx))]
    shape = op.Concat(op.ints(-1, places, 1), op.Shape(offset, start=2), axis=0)
    return op.Reshape(op.Concat(*(op.Reshape(v, shape) for v in scaled), axis=2), op.shape(offset))
