"""Our operator for the gradient of convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.functions import function, op, own
from onnxtrain.ir.standard_form import known_form

# Where kernels of a convolution are slower than products: measured on onnxruntime's CPU kernels, float32
_LEAST_CHANNELS = 8  # of a group, in a gradient of a weight made of matrix products
_LEAST_GROUPS = 8  # in a gradient of x made of a convolution: ConvTranspose takes one group after the other
_MOST_PLACES = 64  # of a kernel: that many products


@function()
def PlaceAt(x, before, sizes):
    """The spatial part of x (axes from 2 on) moved by ``before`` into zeros of ``sizes``; what falls outside is cut."""
    after = sizes - op.Shape(x, start=2) - before
    none = op.Constant(value_ints=[0, 0])
    pads = op.Concat(none, before, none, after, axis=0)
    return op.Pad(x, pads, op.CastLike(op.Constant(value_float=0.0), x))


@function()
def ConvWeightGrad(dy, x, w, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], group: int = 1):
    """Gradient of a convolution's weight, itself a convolution: batch and channels exchanged, steps and dilations too.

    The batch becomes the channels that are summed over, dy the kernel; each group keeps its own channels.
    """
    zero, minus_one = op.Constant(value_ints=[0]), op.Constant(value_ints=[-1])
    groups = op.Reshape(op.Constant(value_int=group), minus_one)
    batch, spatial = op.Shape(x, start=0, end=1), op.Shape(x, start=2)
    parts = op.Reshape(x, op.Concat(zero, groups, op.Shape(w, start=1, end=2), minus_one, axis=0))
    data_shape = op.Concat(op.Shape(w, start=1, end=2), groups * batch, spatial, axis=0)
    data = op.Reshape(op.Transpose(parts, perm=[2, 1, 0, 3]), data_shape)
    rows = op.Transpose(op.Reshape(dy, op.Constant(value_ints=[0, 0, -1])), perm=[1, 0, 2])
    kernel = op.Reshape(rows, op.Concat(op.Shape(w, start=0, end=1), batch, op.Shape(dy, start=2), axis=0))
    wide = op.Conv(data, kernel, strides=dilations, dilations=strides, pads=pads, group=group)
    made = own.PlaceAt(wide, op.Shape(w, start=2) * op.Constant(value_int=0), op.Shape(w, start=2))
    flat = op.Transpose(op.Reshape(made, op.Constant(value_ints=[0, 0, -1])), perm=[1, 0, 2])
    return op.Reshape(flat, op.Shape(w))


@function()
def ConvGrad(dy, x, w, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], group: int = 1):
    """Gradients of Conv: dx, dw, and db, the sum of dy for each channel.

    dx is a transposed convolution without padding, of which the part that lies over x is taken: where the steps do
    not divide x's size, its last elements were in no window, or only in the padding's.
    """
    full = op.ConvTranspose(dy, w, strides=strides, dilations=dilations, group=group)
    sizes = op.Shape(x, start=2)
    before = op.Neg(op.Slice(op.Constant(value_ints=pads), op.Constant(value_ints=[0]), op.Shape(sizes)))
    dx = own.PlaceAt(full, before, sizes)
    dw = own.ConvWeightGrad(dy, x, w, strides=strides, pads=pads, dilations=dilations, group=group)
    db = op.ReduceSum(op.Reshape(dy, op.Constant(value_ints=[0, 0, -1])), op.Constant(value_ints=[0, 2]), keepdims=0)
    return dx, dw, db


@known_form("ConvGrad")
def conv_grad(build: Builder, node: ir.Node) -> list[ir.Value | None]:
    """Only what is read; matrix products and plain convolutions in the place of slower kernels."""
    operands: tuple[Any, ...] = tuple(node.inputs)
    places: dict[str, Any] = {name: shapes.attribute(node, name) for name in ("strides", "pads", "dilations")}
    places["group"] = shapes.attribute(node, "group", 1)
    made: list[ir.Value | None] = [None] * len(node.outputs)
    read = [bool(v.uses()) or v.is_graph_output() for v in node.outputs]
    if read[0]:
        made[0] = _data_gradient(build, *operands, **places)
    if len(read) > 1 and read[1]:
        made[1] = _weight_gradient(build, *operands, **places)
    if len(read) > 2 and read[2]:
        dy = operands[0]
        made[2] = build.ReduceSum(dy, build.ints(0, *range(2, shapes.rank(dy))), keepdims=0)
    return made


def _data_gradient(
    build: Builder, dy: ir.Value, x: ir.Value, w: ir.Value, *, strides: Any, pads: Any, dilations: Any, group: int
) -> ir.Value:
    """dx: a convolution of dy with the weight's kernels turned around, or a transposed one."""
    out, _, *kernel = shapes.known_dims(w)
    count = len(kernel)
    point = all(k == 1 for k in kernel)
    if isinstance(out, int) and all(isinstance(k, int) for k in kernel) and set(strides) == {1}:
        reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        around = [r - p for r, p in zip(reach * 2, pads, strict=True)]
        if (point or group >= _LEAST_GROUPS) and min(around) >= 0:
            kernels = _exchanged(build, w if point else _turned(build, w, count), group)
            return build.Conv(dy, kernels, pads=around, dilations=dilations, group=group)
    full = build.ConvTranspose(dy, w, strides=strides, dilations=dilations, group=group)
    return build.PlaceAt(full, build.ints(*(-p for p in pads[:count])), build.Shape(x, start=2))


def _exchanged(build: Builder, w: ir.Value, group: int) -> ir.Value:
    """A weight with inputs in the place of outputs, in each group for itself."""
    out, inner, *kernel = shapes.known_dims(w)
    if group == 1:
        return build.Transpose(w, perm=[1, 0, *range(2, 2 + len(kernel))])
    apart = build.Reshape(w, build.ints(group, out // group, inner, -1))  # type: ignore[operator]
    exchanged = build.Transpose(apart, perm=[0, 2, 1, 3])
    return build.Reshape(exchanged, build.ints(group * inner, out // group, *kernel))  # type: ignore[operator]


def _turned(build: Builder, w: ir.Value, count: int) -> ir.Value:
    """A weight whose kernels are read from their ends."""
    ends, starts = [-1] * count, [-(2**31)] * count
    axes = build.ints(*range(2, 2 + count))
    return build.Slice(w, build.ints(*ends), build.ints(*starts), axes, build.ints(*ends))


def _weight_gradient(
    build: Builder, dy: ir.Value, x: ir.Value, w: ir.Value, *, strides: Any, pads: Any, dilations: Any, group: int
) -> ir.Value:
    """dw: for each place of the kernel, the product of dy and the elements of x that it met; or a convolution."""
    out, inner, *kernel = shapes.known_dims(w)
    known = isinstance(out, int) and isinstance(inner, int) and all(isinstance(k, int) for k in kernel)
    if not known or inner < _LEAST_CHANNELS or math.prod(kernel) > _MOST_PLACES:  # type: ignore[operator]
        return build.ConvWeightGrad(dy, x, w, strides=strides, pads=pads, dilations=dilations, group=group)
    count = len(kernel)
    if any(pads):
        around = build.ints(0, 0, *pads[:count], 0, 0, *pads[count:])
        x = build.Pad(x, around, build.like(0.0, x))
    exchanged = [1, 0, *range(2, 2 + count)]
    rows = build.Reshape(build.Transpose(dy, perm=exchanged), build.ints(group, out // group, -1))  # type: ignore[operator]
    data, parts = build.Transpose(x, perm=exchanged), build.ints(group, inner, -1)
    steps, axes = build.ints(*strides), build.ints(*range(2, 2 + count))
    one = build.ints(1)
    span = build.Add(build.Mul(build.Sub(build.Shape(dy, start=2), one), steps), one)
    products = []
    for place in itertools.product(*map(range, kernel)):  # type: ignore[arg-type]
        first = build.ints(*(i * d for i, d in zip(place, dilations, strict=True)))
        met = data
        if any(p != 1 for p in (*strides, *kernel)):
            met = build.Slice(data, first, build.Add(first, span), axes, steps)
        columns = build.Transpose(build.Reshape(met, parts), perm=[0, 2, 1])
        products.append(build.MatMul(rows, columns))
    apart = [build.Unsqueeze(p, build.ints(-1)) for p in products]
    whole = apart[0] if len(apart) == 1 else build.Concat(*apart, axis=-1)
    return build.Reshape(whole, build.ints(out, inner, *kernel))
