"""Bounds, spreads and logarithms: at a bound, at no spread and at a saturated probability gradients are torch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.capture.translations import standard, translation, whole

aten = torch.ops.aten
_LOWEST = math.exp(-100)  # below it binary_cross_entropy takes -100 for the logarithm
_STEEPEST = 1e12  # and this for its slope


def _like(value: float, x: Any) -> Any:
    """A constant in the type of a value."""
    return standard().Constant(value=ir.tensor(np.array(value, x.dtype.numpy()), dtype=x.dtype))


@translation(aten.clamp.default, aten.clamp_min.default)
def clamp(x, min=None, max=None):
    """One Clip; integers become floats where a bound is one."""
    op = standard()
    if isinstance(min, float) or isinstance(max, float):
        x = x if x.dtype.is_floating_point() else op.Cast(x, to=int(ir.DataType.FLOAT))
    if x.dtype is None:  # of the cast: torch.onnx infers types later
        x.dtype = ir.DataType.FLOAT
    return op.Clip(x, *(None if bound is None else _like(bound, x) for bound in (min, max)))


@translation(aten.clamp_max.default)
def clamp_max(x, max):
    """The upper bound alone."""
    return clamp(x, None, max)


@translation(aten.clamp.Tensor, aten.clamp_min.Tensor)
def clamp_by_tensors(x, min=None, max=None):
    """An element at a bound keeps its whole gradient: it is not shared with the bound."""
    op = standard()
    if min is not None:
        x = op.Where(op.Less(x, min), min, x)
    return x if max is None else op.Where(op.Greater(x, max), max, x)


@translation(aten.clamp_max.Tensor)
def clamp_max_by_tensor(x, max):
    """The upper bound alone."""
    return clamp_by_tensors(x, None, max)


@translation(aten.hardtanh.default)
def hardtanh(x, min_val=-1.0, max_val=1.0):
    """An element at a bound has no gradient, unlike that of clamp."""
    op, low, high = standard(), _like(min_val, x), _like(max_val, x)
    return op.Where(op.LessOrEqual(x, low), low, op.Where(op.GreaterOrEqual(x, high), high, x))


@translation(aten.relu6.default)
def relu6(x):
    """Nor has it at 0 and at 6."""
    return hardtanh(x, 0.0, 6.0)


@translation(aten.log2.default)
def log2(x):
    """By the logarithm of 2 as exact as the type."""
    return standard().Div(standard().Log(x), _like(math.log(2), x))


@translation(aten.log10.default)
def log10(x):
    """By the logarithm of 10."""
    return standard().Div(standard().Log(x), _like(math.log(10), x))


@translation(aten.binary_cross_entropy.default)
def binary_cross_entropy(x, target, weight=None, reduction=1):
    """A probability that is exactly right has no gradient, and one that is exactly wrong a finite one."""
    op = standard()
    wrong = op.Sub(_like(1, x), x)
    loss = op.Neg(op.Add(op.Mul(target, _logarithm(x)), op.Mul(op.Sub(_like(1, x), target), _logarithm(wrong))))
    loss = loss if weight is None else op.Mul(loss, weight)
    return (loss, op.ReduceMean(loss, keepdims=0), op.ReduceSum(loss, keepdims=0))[reduction]


def _logarithm(x: Any) -> Any:
    """-100 and steep where it would be less."""
    op = standard()
    flat = op.LessOrEqual(x, _like(_LOWEST, x))
    steep = op.Sub(op.Mul(x, _like(_STEEPEST, x)), _like(100, x))
    return op.Where(flat, steep, op.Log(op.Where(flat, _like(1, x), x)))


@translation(aten.std.correction)
def standard_deviation(x, dim=None, correction=1, keepdim=False):
    """Its gradient is 0, not infinite, where all elements are equal."""
    op = standard()
    axes = op.Constant(value_ints=list(dim) if dim and len(x.shape) else list(range(len(x.shape))))
    off = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    count = op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=0)
    freedom = op.Max(op.Sub(op.CastLike(count, x), _like(correction, x)), _like(0, x))
    variance = op.Div(op.ReduceSum(op.Mul(off, off), axes, keepdims=int(keepdim)), freedom)
    none = op.Equal(variance, _like(0, x))
    return op.Where(none, variance, op.Sqrt(op.Where(none, _like(1, x), variance)))


@translation(aten.std_mean.correction)
def deviation_and_mean(x, dim=None, correction=1, keepdim=False):
    """The same, and the mean."""
    axes = standard().Constant(value_ints=list(dim) if dim and len(x.shape) else list(range(len(x.shape))))
    return standard_deviation(x, dim, correction, keepdim), standard().ReduceMean(x, axes, keepdims=int(keepdim))


@whole(aten.sinc.default)
def has_no_value_at_zero(node: torch.fx.Node) -> bool:
    """The formula divides by 0 there, and its gradient is no number."""
    return True
