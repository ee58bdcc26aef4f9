"""Gathering, scattering, and tensors made from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.dtypes import as_tensor, torch_dtype
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten


@lowering("Gather", scalars=(1,), view=True)
def gather(x: Tensor, indices: Tensor | int, *, axis: int = 0) -> Tensor:
    """Slices of x along an axis; indices may be negative."""
    axis = axis % x.dim()
    if isinstance(indices, int):
        return x.select(axis, indices)
    if not indices.dim() and x.device.type != "cpu":  # as an index, torch would wait for it
        return x.index_select(axis, _positive(indices, x.shape[axis]).reshape(1)).squeeze(axis)
    return x[(slice(None),) * axis + (indices.long(),)]


@lowering("GatherGrad", domain=DOMAIN, host=(2,))
def gather_grad(dy: Tensor, indices: Tensor, shape: Any, *, axis: int = 0, into: Tensor | None = None) -> Tensor:
    """Slices of dy added at their indices."""
    axis = axis % len(shape)
    flat = indices.reshape(-1).long()
    flat = torch.where(flat < 0, flat + shape[axis], flat)
    slices = dy.reshape(*shape[:axis], flat.numel(), *shape[axis + 1 :])

    def sums(at: Tensor, count: int) -> Tensor:
        made = torch.zeros((*shape[:axis], count, *shape[axis + 1 :]), dtype=dy.dtype, device=dy.device)
        return made.index_add_(axis, at, slices)

    if into is None or axis or not _is_sparse(into, dy, flat):
        return sums(flat, shape[axis])
    return _add_rows_(into, flat, slices, sums)


def _is_sparse(table: Tensor, dy: Tensor, indices: Tensor) -> bool:
    """Whether rows of dy at their indices are added to a table one by one: most of it stays as it is."""
    return indices.numel() < table.shape[0] and table.dtype == dy.dtype


def _add_rows_(table: Tensor, flat: Tensor, rows: Tensor, sums: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Rows added to a table at their indices, in place.

    On CPU rows of one index are summed before: the numbers are those of the sum of two tables. Elsewhere to know how
    many indices there are would be to wait for the device.
    """
    if table.device.type != "cpu":
        return table.index_put_((flat,), rows, accumulate=True)
    found, at = torch.unique(flat, return_inverse=True)
    return table.index_add_(0, found, sums(at, found.numel()))


@lowering("Embedding", domain=DOMAIN)
def embedding(weight: Tensor, indices: Tensor, *, padding_idx: int = -1) -> Tensor:
    """Rows of a table."""
    return F.embedding(indices, weight)


@lowering("EmbeddingGrad", domain=DOMAIN, host=(2,))
def embedding_grad(
    dy: Tensor, indices: Tensor, shape: Any, *, padding_idx: int = -1, into: Tensor | None = None
) -> Tensor:
    """Rows of dy added at their indices."""
    if into is None or not _is_sparse(into, dy, indices):
        return aten.embedding_dense_backward(dy, indices, shape[0], padding_idx, False)
    flat, rows = _rows(dy, indices, padding_idx)
    return _add_rows_(into, flat, rows, lambda at, n: aten.embedding_dense_backward(rows, at, n, -1, False))


def _rows(dy: Tensor, indices: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Indices as a vector, and the row of dy for each one: zeros for that of padding."""
    flat = indices.reshape(-1)
    rows = dy.reshape(flat.numel(), dy.shape[-1])
    return flat, rows if padding_idx < 0 else rows.masked_fill((flat == padding_idx).unsqueeze(-1), 0)


def add_embedding_grad_(base: Tensor, dy: Tensor, indices: Tensor, *, padding_idx: int = -1) -> Tensor:
    """Rows of dy added to a table at their indices, in place."""
    flat, rows = _rows(dy, indices, padding_idx)
    return base.index_add_(0, flat, rows)


@lowering("AddEmbeddingGrad", domain=DOMAIN, inplace=add_embedding_grad_)
def add_embedding_grad(base: Tensor, dy: Tensor, indices: Tensor, *, padding_idx: int = -1) -> Tensor:
    """Rows of dy added to a copy of a table at their indices."""
    return add_embedding_grad_(base.clone(), dy, indices, padding_idx=padding_idx)


def _positive(indices: Tensor, size: int) -> Tensor:
    return torch.where(indices < 0, indices + size, indices).long()


@lowering("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """One element for each index."""
    return torch.gather(x, axis, _positive(indices, x.shape[axis]))


@lowering("GatherND", view=True)
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Slices of x at index tuples, within each entry of the batch."""
    inner = indices.dim() - 1 - batch_dims
    batch = [
        torch.arange(n, device=x.device).reshape([-1] + [1] * (batch_dims - i - 1 + inner))
        for i, n in enumerate(x.shape[:batch_dims])
    ]
    return x[(*batch, *indices.long().unbind(-1))]


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@lowering("ScatterElements")
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    """Updates written to, or combined with, the elements at the indices."""
    at = _positive(indices, x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, at, updates)
    if reduction == "add":
        return torch.scatter_add(x, axis, at, updates)
    return torch.scatter_reduce(x, axis, at, updates, _REDUCTIONS[reduction], include_self=True)


@lowering("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """Updates written to, or combined with, the slices at the index tuples."""
    at = tuple(indices.long().unbind(-1))
    if reduction in ("none", "add"):
        return torch.index_put(x, at, updates, accumulate=reduction == "add")
    sizes = x.shape[: len(at)]
    flat = at[0].new_zeros(())
    for part, size in zip(at, sizes, strict=True):
        flat = flat * size + _positive(part, size)
    rows = x.reshape(math.prod(sizes), -1)
    source = updates.reshape(-1, rows.shape[1])
    made = rows.index_reduce(0, flat.reshape(-1), source, _REDUCTIONS[reduction])
    return made.reshape(x.shape)


@lowering("TopK", host=(1,))
def top_k(x: Tensor, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements along an axis, and their indices; all of them as sort has ties."""
    count = k[0] if isinstance(k, tuple) else k
    if x.dim() and int(count) == x.shape[axis]:
        whole = x if any(x.stride()) else x.contiguous()  # one number expanded, which eager PyTorch has written out
        made = torch.sort(whole, dim=axis, descending=bool(largest))
        return made.values, made.indices
    made = torch.topk(x, count, axis, bool(largest), bool(sorted))
    return made.values, made.indices


@lowering("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Index of the largest element."""
    return _arg(torch.argmax, x, axis, bool(keepdims), bool(select_last_index))


@lowering("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Index of the smallest element."""
    return _arg(torch.argmin, x, axis, bool(keepdims), bool(select_last_index))


def _arg(find: Any, x: Tensor, axis: int, keep: bool, last: bool) -> Tensor:
    if not last:
        return find(x, axis, keepdim=keep)
    return x.shape[axis] - 1 - find(torch.flip(x, (axis,)), axis, keepdim=keep)


@lowering("OneHot", host=(1,))
def one_hot(indices: Tensor, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    """``values[1]`` at the indices, ``values[0]`` elsewhere; indices out of range are nowhere."""
    size = depth[0] if isinstance(depth, tuple) else int(depth)
    axis = axis + indices.dim() + 1 if axis < 0 else axis
    at = torch.where(indices < 0, indices + size, indices).unsqueeze(axis)
    classes = torch.arange(size, device=indices.device).reshape(
        [-1 if i == axis else 1 for i in range(indices.dim() + 1)]
    )
    return torch.where(at == classes, values[1], values[0])


@lowering("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """The slices along an axis, or the elements, for which the condition is true."""
    places = torch.nonzero(condition).reshape(-1)
    return torch.index_select(x.reshape(-1) if axis is None else x, axis or 0, places)


@lowering("Unique")
def unique(x: Tensor, *, outputs: int, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...] | Tensor:
    """Different elements (or slices): themselves, where each comes first, which each is, how often each comes."""
    made, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    inverse, axis = inverse.reshape(-1), axis or 0
    places = torch.arange(inverse.numel(), device=x.device)
    first = torch.full_like(counts, inverse.numel()).scatter_reduce(0, inverse, places, "amin")
    if not sorted:
        order = torch.argsort(first)
        made, first, counts = made.index_select(axis, order), first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return made if outputs == 1 else (made, first, inverse, counts)[:outputs]


@lowering("EyeLike")
def eye_like(x: Tensor, *, dtype: int, k: int = 0) -> Tensor:
    """Ones on a diagonal, in the shape of a matrix."""
    return torch.ones(x.shape, dtype=torch_dtype(dtype), device=x.device).tril(k).triu(k)


@lowering("NonZero")
def non_zero(x: Tensor) -> Tensor:
    """Index tuples of elements that are not 0: (rank, count)."""
    return torch.nonzero(x).t()


@lowering("ConstantOfShape", host=(0,))
def constant_of_shape(shape: Any, *, device: str, value: Any = None) -> Tensor:
    """One number in a shape."""
    if value is None:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    number = as_tensor(value, "cpu")
    return torch.full(shape, number.item(), dtype=number.dtype, device=device)


@lowering("Range", host=(0, 1, 2))
def range_(start: float, limit: float, delta: float, *, dtype: int, device: str) -> Tensor:
    """start, start + delta, … below limit."""
    return torch.arange(start, limit, delta, dtype=torch_dtype(dtype), device=device)
