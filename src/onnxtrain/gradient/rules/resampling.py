"""Gradients of resizing and of sampling at given places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.gradient.registry import Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.functions.codes import COORDINATES, GRID_MODES, NEAREST, PADDINGS, RESIZE_MODES

Value = ir.Value


@gradient("Resize")
def resize(
    ctx: Context,
    dy: Value,
    x: Value,
    roi: Value | None = None,
    scales: Value | None = None,
    sizes: Value | None = None,
    *,
    axes: Sequence[int] | None = None,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
    keep_aspect_ratio_policy: str = "stretch",
    **_: Any,
) -> Any:
    """One ResizeGrad node for each three axes that may change: Resize works on each axis by itself."""
    op, rank = ctx.op, shapes.rank(x)
    given = [a % rank for a in axes] if axes is not None else list(range(rank))
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    changed = given if crop else _changed_axes(ctx, x, scales, given)
    factors = _scales(op, x, ctx.y, scales, sizes, given, keep_aspect_ratio_policy)
    starts, ends = _region(op, roi if crop else None, len(given))
    ways: dict[str, Any] = {
        "mode": RESIZE_MODES[mode],
        "coordinates": COORDINATES[coordinate_transformation_mode],
        "nearest": NEAREST[nearest_mode],
        "cubic_coeff_a": cubic_coeff_a,
        "exclude_outside": exclude_outside,
        "antialias": antialias,
    }
    changed, dx = sorted(changed), dy
    while changed:
        group, changed = changed[-3:], changed[:-3]
        at = op.ints(*(given.index(a) for a in group))
        dx = _along(op, dx, x, group, [op.Gather(v, at) for v in (factors, starts, ends)], ways)
    return dx


def _along(
    op: Builder, dy: Value, x: Value, axes: Sequence[int], given: Sequence[Value], ways: dict[str, Any]
) -> Value:
    """dy with these axes, at most three, back in x's sizes: brought to the end and filled up to three."""
    rank = shapes.rank(x)
    order = [*(a for a in range(rank) if a not in axes), *axes]
    ones, at = op.ints(*[1] * (3 - len(axes))), op.ints(*axes)
    source = op.Gather(op.shape(x), at)
    zero, one = (op.constant([v] * (3 - len(axes)), ir.DataType.DOUBLE) for v in (0.0, 1.0))
    scales, starts, ends = given
    rows = op.Reshape(_permuted(op, dy, order), op.Concat(op.ints(-1), ones, op.Gather(op.shape(dy), at), axis=0))
    region = op.Concat(zero, starts, one, ends, axis=0)
    made = op.ResizeGrad(rows, op.Concat(ones, source, axis=0), op.Concat(one, scales, axis=0), region, **ways)
    kept = [op.size(dy, a) for a in order[: -len(axes)]]
    return _permuted(op, op.Reshape(made, op.Concat(*kept, source, axis=0)), [order.index(a) for a in range(rank)])


def _permuted(op: Builder, value: Value, order: Sequence[int]) -> Value:
    return value if list(order) == sorted(order) else op.Transpose(value, perm=list(order))


def _changed_axes(ctx: Context, x: Value, scales: Value | None, given: Sequence[int]) -> list[int]:
    """The axes that may change their size."""
    factors = shapes.constant_of(scales)
    if factors is not None and factors.size:
        changed = [a for a, f in zip(given, factors.reshape(-1), strict=True) if f != 1.0]
    else:
        pairs = list(zip(shapes.known_dims(x), shapes.known_dims(ctx.y), strict=True))
        changed = [a for a in given if pairs[a][0] != pairs[a][1]]
    return changed


def _scales(
    op: Builder, x: Value, y: Value, scales: Value | None, sizes: Value | None, given: Sequence[int], policy: str
) -> Value:
    """The factor of each given axis as a double: stated, or the ratio of sizes; one for all that keeps proportions."""
    double = ir.DataType.DOUBLE
    if scales is not None and shapes.dims_of(scales) != (0,):
        return op.cast(scales, double)
    wanted = op.Gather(op.shape(y), op.ints(*given)) if policy == "stretch" else sizes
    assert wanted is not None
    ratios = op.Div(op.cast(wanted, double), op.cast(op.Gather(op.shape(x), op.ints(*given)), double))
    if policy == "stretch":
        return ratios
    one = (op.ReduceMin if policy == "not_larger" else op.ReduceMax)(ratios, keepdims=1)
    return op.Expand(one, op.shape(ratios))


def _region(op: Builder, roi: Value | None, count: int) -> tuple[Value, Value]:
    """Starts and ends of the crop along the given axes, as doubles."""
    if roi is None:
        return tuple(op.constant([v] * count, ir.DataType.DOUBLE) for v in (0.0, 1.0))  # type: ignore[return-value]
    return op.Split(op.cast(roi, ir.DataType.DOUBLE), axis=0, outputs=2, num_outputs=2)


@gradient("GridSample")
def grid_sample(
    ctx: Context,
    dy: Value,
    x: Value,
    grid: Value,
    *,
    mode: str = "linear",
    padding_mode: str = "zeros",
    align_corners: int = 0,
) -> Any:
    """One node: see ``grid_gradients``."""
    kind = GRID_MODES[mode]
    if shapes.rank(x) == 5 and kind == GRID_MODES["cubic"]:
        raise ctx.unsupported("the gradient of a cubic GridSample of volumes")
    return grid_gradients(ctx.op, dy, x, grid, kind, padding=PADDINGS[padding_mode], align_corners=align_corners)


def grid_gradients(op: Builder, dy: Value, x: Value, grid: Value, kind: int, **ways: int) -> tuple[Value, Value | None]:
    """dx and dgrid of GridSample, over three spatial axes: an image is a volume of depth 1, sampled at its middle."""
    flat, at = shapes.rank(x) == 4, op.ints(2)
    volume, places, g = x, grid, dy
    if flat:
        volume, g = op.Unsqueeze(x, at), op.Unsqueeze(dy, at)
        zeros = op.Expand(op.like(0.0, grid), op.Concat(op.Shape(grid, start=0, end=-1), op.ints(1), axis=0))
        places = op.Concat(grid, zeros, axis=-1)
    dgrid = None
    if kind == GRID_MODES["nearest"]:
        dx = op.NearestGridSampleGrad(g, volume, places, **ways)
    else:
        made = op.CubicGridSampleGrad if kind == GRID_MODES["cubic"] else op.GridSampleGrad
        dx, dgrid = made(g, volume, places, outputs=2, **ways)
    if flat:
        dx = op.Squeeze(dx, at)
        dgrid = None if dgrid is None else op.Slice(dgrid, op.ints(0), op.ints(2), op.ints(-1))
    return dx, dgrid


@gradient("AffineGrid")
def affine_grid(ctx: Context, dy: Value, theta: Value, size: Value, *, align_corners: int = 0) -> Any:
    """dyᵀ times the coordinates of the grid, which the identity gives, with a column of ones."""
    op, rank = ctx.op, shapes.rank(dy) - 2
    identity = op.constant([np.eye(rank, rank + 1)], shapes.dtype_of(theta))
    one = op.Concat(op.ints(1), op.Slice(size, op.ints(1), op.ints(rank + 2)), axis=0)
    places = op.Reshape(op.AffineGrid(identity, one, align_corners=align_corners), op.ints(-1, rank))
    ones = op.Expand(op.like(1.0, theta), op.Concat(op.Shape(places, start=0, end=1), op.ints(1), axis=0))
    rows = op.Reshape(dy, op.ints(0, -1, rank))
    return op.MatMul(op.transpose(rows), op.Concat(places, ones, axis=1)), None


@gradient("RoiAlign")
def roi_align(
    ctx: Context,
    dy: Value,
    x: Value,
    rois: Value,
    images: Value,
    *,
    mode: str = "avg",
    coordinate_transformation_mode: str = "half_pixel",
    **attributes: Any,
) -> Any:
    """One node; the regions themselves get none, as in torchvision."""
    if mode != "avg":
        raise ctx.unsupported(f"the gradient of RoiAlign in mode {mode!r}")
    half = int(coordinate_transformation_mode == "half_pixel")
    return ctx.op.RoiAlignGrad(dy, rois, images, ctx.op.shape(x), half_pixel=half, **attributes), None, None
