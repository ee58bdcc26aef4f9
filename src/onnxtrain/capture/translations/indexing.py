"""Calls that torch.onnx would translate to something else than torch computes; they stay whole."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import translation, whole

aten = torch.ops.aten


@translation(aten.flip.default)
def flip(x, dims):
    """A number stays as it is, whatever axis is named."""
    return NotImplemented if len(x.shape) else op.Identity(x)


@translation(aten.nonzero.default, aten.argwhere.default)
def nonzero(x):
    """Of a number that is not zero one row of no places, of zero none; runtimes differ in NonZero of a number."""
    if len(x.shape):
        return NotImplemented
    rows = op.Transpose(op.NonZero(op.Reshape(x, _one())), perm=[1, 0])
    nothing = op.Constant(value_ints=[0])
    return op.Slice(rows, nothing, nothing, _one())


@translation(aten.roll.default)
def roll(x, shifts, dims=()):
    """What is behind a place, then what is before it; torch.onnx divides by a size, which may be 0."""
    rank = len(x.shape)
    if rank == 0:
        return op.Identity(x)
    if not dims:
        flat = op.Reshape(x, op.Constant(value_ints=[-1]))
        return op.Reshape(_rolled(flat, shifts[0], 0), op.Shape(x), allowzero=1)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, shift, dim % rank)
    return x


def _rolled(x: Any, shift: Any, axis: int) -> Any:
    axes, size = op.Constant(value_ints=[axis]), op.Shape(x, start=axis, end=axis + 1)
    back = op.Constant(value_ints=[-shift]) if isinstance(shift, int) else op.Neg(op.Reshape(shift, _one()))
    place = op.Mod(back, op.Max(size, _one()))
    return op.Concat(op.Slice(x, place, size, axes), op.Slice(x, op.Constant(value_ints=[0]), place, axes), axis=axis)


def _one() -> Any:
    return op.Constant(value_ints=[1])


@whole(aten.scatter_reduce.two)
def is_mean_or_without_self(node: torch.fx.Node) -> bool:
    """ScatterElements knows no mean, and always takes the value that is there into account."""
    return node.args[4] == "mean" or not node.kwargs.get("include_self", True) or is_scalar(node)


@whole(
    *(aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.gather.default, aten.masked_scatter.default)
)
def is_scalar(node: torch.fx.Node) -> bool:
    """ONNX's gather and scatter have no form for tensors without dimensions."""
    return any(n.meta["val"].dim() == 0 for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))


@whole(aten.index_fill.int_Tensor)
def is_filled_by_a_tensor(node: torch.fx.Node) -> bool:
    """Taken apart, a value filled in twice gets the gradient of one place."""
    return True


@translation(aten.diagonal_scatter.default)
def diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    """On the diagonal the values of ``src``, elsewhere those of ``x``; taken apart, it would be written in place."""
    rank = len(x.shape)
    order = [a for a in range(rank) if a not in (dim1 % rank, dim2 % rank)] + [dim1 % rank, dim2 % rank]
    moved = op.Transpose(x, perm=order)
    rows, columns = (_places(moved, axis) for axis in (rank - 2, rank - 1))
    is_on = op.Equal(op.Add(op.Unsqueeze(rows, _one()), op.Constant(value_int=offset)), columns)
    longer = op.Pad(src, op.Constant(value_ints=[0] * (2 * rank - 3) + [1]))  # by what is nowhere seen
    place = op.Min(rows if offset >= 0 else columns, op.Squeeze(op.Shape(src, start=rank - 2)))
    each = op.Unsqueeze(op.Gather(longer, place, axis=rank - 2), op.Constant(value_ints=[-1 if offset >= 0 else -2]))
    if x.dtype == ir.DataType.BOOL:  # of which onnxruntime has no Where
        made = op.Or(op.And(is_on, each), op.And(op.Not(is_on), moved))
    else:
        made = op.Where(is_on, each, moved)
    return op.Transpose(made, perm=[order.index(a) for a in range(rank)])


def _places(x: Any, axis: int) -> Any:
    """Every place along an axis."""
    size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    return op.Range(op.Constant(value_int=0), size, op.Constant(value_int=1))
