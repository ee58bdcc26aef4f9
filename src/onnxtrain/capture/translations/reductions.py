"""Norms of vectors; extremes with their places; whether any or all elements are true."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import translation, whole

aten = torch.ops.aten


@translation(aten.linalg_vector_norm.default)
def vector_norm(x, ord=2.0, dim=None, keepdim=False):
    """One reduction; over all axes where none are named, which torch.onnx makes a tensor without them."""
    axes = () if not dim else (op.Constant(value_ints=list(dim)),)
    if math.isinf(ord):
        return (op.ReduceMax if ord > 0 else op.ReduceMin)(op.Abs(x), *axes, keepdims=int(keepdim))
    return (op.ReduceL2 if ord == 2 else op.ReduceL1)(x, *axes, keepdims=int(keepdim))


@translation(aten.max.dim)
def max_along(x, dim, keepdim=False):
    """The element at the first place of the largest one: it alone gets the gradient, in torch, where there are ties."""
    return _extreme_along(op.ArgMax, x, dim, keepdim)


@translation(aten.min.dim)
def min_along(x, dim, keepdim=False):
    """The same of the smallest."""
    return _extreme_along(op.ArgMin, x, dim, keepdim)


def _extreme_along(place_of, x, dim, keepdim) -> Any:
    axes = op.Constant(value_ints=[dim])
    if len(x.shape) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    is_truth = x.dtype == ir.DataType.BOOL  # which ONNX compares as a number alone
    place = place_of(op.Cast(x, to=ir.DataType.UINT8) if is_truth else x, axis=dim, keepdims=1)
    found = op.GatherElements(x, place, axis=dim)
    return (found, place) if keepdim else (op.Squeeze(found, axes), op.Squeeze(place, axes))


@translation(aten.mean.default, aten.mean.dim)
def mean(x, dim=None, keepdim=False, dtype=None):
    """One ReduceMean, in the type that is asked for."""
    return _reduced(op.ReduceMean, x, dim, keepdim, dtype)


@translation(aten.sum.default, aten.sum.dim_IntList)
def total(x, dim=None, keepdim=False, dtype=None):
    """One ReduceSum, in the type that is asked for."""
    return _reduced(op.ReduceSum, x, dim, keepdim, dtype)


@translation(aten.prod.default)
def product(x, dtype=None):
    """One ReduceProd, in the type that is asked for."""
    return _reduced(op.ReduceProd, x, None, False, dtype)


@translation(aten.prod.dim_int)
def product_along(x, dim, keepdim=False, dtype=None):
    """The same along an axis."""
    return _reduced(op.ReduceProd, x, [dim], keepdim, dtype)


@translation(aten.cumsum.default)
def cumulative_sum(x, dim, dtype=None):
    """One CumSum, in the type that is asked for; a number is its own."""
    rank = len(x.shape)
    x = x if dtype is None else op.Cast(x, to=dtype)
    return op.CumSum(x, op.Constant(value_int=dim)) if rank else op.Identity(x)


@translation(aten.softmax.int, aten.special_softmax.default)
def softmax(x, dim, dtype=None):
    """One Softmax, in the type that is asked for; a number as a vector of one."""
    return _normalized(op.Softmax, x, dim, dtype)


@translation(aten.log_softmax.int, aten.special_log_softmax.default)
def log_softmax(x, dim, dtype=None):
    """One LogSoftmax, likewise: torch.onnx computes it in the type of what is given."""
    return _normalized(op.LogSoftmax, x, dim, dtype)


def _normalized(operator, x, dim, dtype) -> Any:
    rank = len(x.shape)
    x = x if dtype is None else op.Cast(x, to=dtype)
    return operator(x, axis=dim) if rank else op.Squeeze(operator(op.Reshape(x, [1]), axis=0))


@translation(aten.amax.default)
def largest(x, dim=(), keepdim=False):
    """The largest elements; a number is its own, whatever axis is named."""
    return _reduced(op.ReduceMax, x, dim or range(len(x.shape)), keepdim)


@translation(aten.amin.default)
def smallest(x, dim=(), keepdim=False):
    """The smallest ones."""
    return _reduced(op.ReduceMin, x, dim or range(len(x.shape)), keepdim)


@translation(aten.aminmax.default)
def extremes(x, dim=None, keepdim=False):
    """Both."""
    dims = () if dim is None else (dim,)
    return smallest(x, dims, keepdim), largest(x, dims, keepdim)


def _reduced(reduction, x, dim, keepdim, dtype=None) -> Any:
    axes = (op.Constant(value_ints=list(dim)),) if dim and len(x.shape) else ()
    return reduction(x if dtype is None else op.Cast(x, to=dtype), *axes, keepdims=int(keepdim))


@translation(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(x, dim=None, keepdim=False):
    """Whether there are true ones: there are none among nothing."""
    return _count(x, dim, keepdim, True)


@translation(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(x, dim=None, keepdim=False):
    """Whether there are no false ones."""
    return op.Not(_count(x, dim, keepdim, False))


def _count(x, dim, keepdim, wanted) -> Any:
    """Whether there are elements that are true, or false."""
    axes = () if dim is None else (op.Constant(value_ints=[dim] if type(dim) is int else dim),)
    true = op.Cast(x, to=int(ir.DataType.BOOL))
    counted = op.Cast(true if wanted else op.Not(true), to=int(ir.DataType.INT64))
    if len(x.shape):
        counted = op.ReduceSum(counted, *axes, keepdims=int(keepdim))
    return op.Greater(counted, op.Constant(value_int=0))


@whole(aten.linalg_vector_norm.default)
def is_of_another_order(node: torch.fx.Node) -> bool:
    """Powers have no gradient at zero where torch's norm has one; and numbers are no vectors."""
    order: Any = node.args[1] if len(node.args) > 1 else 2.0
    scalar = node.args[0].meta["val"].dim() == 0  # type: ignore[union-attr]
    return scalar or bool(node.kwargs.get("dtype")) or order not in (1, 2, math.inf, -math.inf)


@whole(aten._euclidean_dist.default)
def has_a_root_of_zero(node: torch.fx.Node) -> bool:
    """A distance of 0 (``torch.cdist`` of many rows) has gradient 0 in torch; that of the formula's root is none."""
    return True
