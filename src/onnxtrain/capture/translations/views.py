"""Other shapes, orders and parts of the same elements, and copies: one node each."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import like, translation, typed, vector

aten = torch.ops.aten
_LAST = 2**63 - 1


@translation(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
def reshape(x, shape):
    """One Reshape to these very sizes: torch.onnx's takes a 0 among them for the operand's size in that place."""
    return op.Reshape(x, vector(shape), allowzero=1)


@translation(aten.transpose.int)
def transpose(x, first, second):
    """One Transpose; a number stays as it is."""
    axes = list(range(len(x.shape)))
    if not axes:
        return op.Identity(x)
    axes[first], axes[second] = axes[second], axes[first]
    return op.Transpose(x, perm=axes)


@translation(aten.t.default)
def transposed(x):
    """The two axes exchanged; fewer stay as they are."""
    return op.Transpose(x, perm=[1, 0]) if len(x.shape) == 2 else op.Identity(x)


@translation(aten.permute.default)
def permute(x, axes):
    """One Transpose."""
    return op.Transpose(x, perm=[axis % len(axes) for axis in axes]) if axes else op.Identity(x)


@translation(aten.expand.default)
def expand(x, shape, implicit=False):
    """One Expand, to which a size of 1 says what -1 says to torch."""
    return op.Expand(x, vector([1 if isinstance(s, int) and s == -1 else s for s in shape]))


@translation(aten.repeat.default)
def repeat(x, repeats):
    """One Tile of a tensor with as many axes."""
    further = len(repeats) - len(x.shape)
    x = op.Unsqueeze(x, list(range(further))) if further else x
    return op.Tile(x, vector(repeats)) if repeats else op.Identity(x)


@translation(aten.unsqueeze.default)
def unsqueeze(x, axis):
    """One Unsqueeze."""
    return op.Unsqueeze(x, [axis])


@translation(aten.squeeze.dim)
def squeeze(x, axis):
    """One Squeeze of an axis of 1: where a size of the inputs is not, the trace has another call; others stay."""
    is_other = not len(x.shape) or (isinstance(x.shape[axis], int) and x.shape[axis] != 1)
    return op.Identity(x) if is_other else op.Squeeze(x, [axis])


@translation(aten.select.int)
def select(x, axis, place):
    """One Gather of a place."""
    return op.Gather(x, place, axis=axis)


@translation(aten.slice.Tensor)
def slice_of(x, axis=0, start=None, end=None, step=1):
    """One Slice."""
    bounds = [vector([0 if start is None else start]), vector([_LAST if end is None else end])]
    return op.Slice(x, *bounds, vector([axis]), vector([step]))


@translation(aten.index_select.default)
def index_select(x, axis, place):
    """One Gather along an axis; a single index leaves the axis."""
    if not len(x.shape):
        return NotImplemented
    return op.Gather(x, place if len(place.shape) else op.Unsqueeze(place, [0]), axis=axis)


@translation(aten.slice_scatter.default)
def slice_scatter(x, source, axis=0, start=None, end=None, step=1):
    """What is before a slice, another slice, and what is behind it, where its bounds are told from one end."""
    start, end = start or 0, _LAST if end is None else end
    if not all(isinstance(bound, int) for bound in (start, end, step)) or step != 1 or end < start:
        return NotImplemented
    if start < 0 <= end < _LAST:
        return NotImplemented
    return _with(x, source, axis, start, end)


@translation(aten.select_scatter.default)
def select_scatter(x, source, axis, place):
    """What is before a place, what is put there, and what is behind it."""
    if not isinstance(place, int):
        return NotImplemented
    return _with(x, op.Unsqueeze(source, [axis]), axis, place, place + 1 or _LAST)


def _with(x: Any, source: Any, axis: int, start: int, end: int) -> Any:
    parts = [slice_of(x, axis, 0, start)] if start else []
    parts += [source] + ([slice_of(x, axis, end)] if end < _LAST else [])
    return op.Concat(*parts, axis=axis) if len(parts) > 1 else op.Identity(source)


@translation(aten.diff.default)
def diff(x, n=1, dim=-1, prepend=None, append=None):
    """From each element to the next one; of truth values whether they differ."""
    parts = [part for part in (prepend, x, append) if part is not None]
    x = op.Concat(*parts, axis=dim) if len(parts) > 1 else x
    for _ in range(n):
        later, sooner = slice_of(x, dim, 1), slice_of(x, dim, 0, -1)
        x = op.Not(op.Equal(later, sooner)) if parts[0].dtype == ir.DataType.BOOL else op.Sub(later, sooner)
    return x


@translation(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x, indices):
    """One GatherND of indices in front, one Gather of a single other: joined axes stay in place if side by side."""
    kinds = {given.dtype for given in indices if given is not None}
    if kinds == {ir.DataType.BOOL} or not kinds <= {ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32}:
        return NotImplemented  # masks alone
    indices = [part for given in indices for part in _places_of(given)]
    places = [place for place, given in enumerate(indices) if given is not None]
    indices = [given if given is None else typed(given, ir.DataType.INT64) for given in indices]
    if places == [0]:
        return op.GatherND(x, op.Unsqueeze(indices[0], [-1]))
    if len(places) == 1:
        return op.Gather(x, indices[places[0]], axis=places[0])
    others = [axis for axis in range(len(x.shape)) if axis not in places]
    first, apart = places[0], places[-1] - places[0] >= len(places)
    given = [indices[place] for place in places]
    shape = op.Shape(op.Max(*given))
    found = x if places == list(range(len(places))) else op.Transpose(x, perm=[*places, *others])
    found = op.GatherND(found, op.Concat(*(op.Unsqueeze(op.Expand(g, shape), [-1]) for g in given), axis=-1))
    if apart or not first:
        return found
    rank = max(len(g.shape) for g in given)
    behind = range(rank + first, rank + len(others))
    return op.Transpose(found, perm=[*range(rank, rank + first), *range(rank), *behind])


def _places_of(index: Any) -> list[Any]:
    """An index; of a mask beside other indices the places that it is true at, by axis."""
    if index is None or index.dtype != ir.DataType.BOOL:
        return [index]
    found = op.NonZero(index)
    return [op.Gather(found, op.Constant(value_int=axis), axis=0) for axis in range(len(index.shape))]


@translation(aten.cat.default)
def cat(tensors, axis=0):
    """One Concat; of one tensor that tensor. Vectors of nothing are none of them among others of another rank."""
    rank = max(len(t.shape) for t in tensors)
    joined = [t for t in tensors if len(t.shape) == rank]
    return op.Concat(*joined, axis=axis) if len(joined) > 1 else op.Identity(joined[0])


@translation(aten.gather.default)
def gather(x, axis, place, sparse_grad=False):
    """One GatherElements."""
    return op.GatherElements(x, place, axis=axis)


@translation(aten.pad.default, aten.constant_pad_nd.default)
def pad(x, pads, mode="constant", value=None):
    """One Pad with a number; torch names the last axis first."""
    if isinstance(mode, int | float):  # constant_pad_nd has no mode
        mode, value = "constant", mode
    if mode != "constant":
        return NotImplemented
    untouched = [0] * (len(x.shape) - len(pads) // 2)
    before, after = ([*untouched, *reversed(pads[side::2])] for side in (0, 1))
    return op.Pad(x, vector([*before, *after]), like(0 if value is None else value, x))


@translation(aten.stack.default)
def stack(tensors, axis=0):
    """The tensors, each with another axis, in one Concat."""
    if not isinstance(tensors, list | tuple):
        return NotImplemented
    return op.Concat(*(op.Unsqueeze(t, [axis]) for t in tensors), axis=axis)


@translation(aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default, aten.alias.default)
def copy(x, memory_format=None):
    """The same elements."""
    return op.Identity(x)


@translation(aten._to_copy.default)
def to_copy(x, dtype=None, **_: Any):
    """The same elements, in another type."""
    if dtype is None:
        return op.Identity(x)
    is_complex = ir.DataType(dtype) in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)
    return NotImplemented if is_complex else op.Cast(x, to=dtype)


@translation(torch.ops.prims.convert_element_type.default)
def convert_element_type(x, dtype):
    """The same elements, in another type."""
    return to_copy(x, dtype)


@translation(aten.type_as.default)
def type_as(x, other):
    """The same elements in the type of another."""
    return op.CastLike(x, other)


@translation(aten.sym_size.int)
def sym_size(x, axis):
    """One size, as a number."""
    rank = len(x.shape)
    return op.Squeeze(op.Shape(x, start=axis % rank, end=axis % rank + 1))


@translation(aten.tril.default)
def tril(x, diagonal=0):
    """What is not above a diagonal."""
    return op.Trilu(x, diagonal, upper=0)


@translation(aten.triu.default)
def triu(x, diagonal=0):
    """What is not below a diagonal."""
    return op.Trilu(x, diagonal, upper=1)
