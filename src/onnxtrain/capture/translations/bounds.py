"""Bounds, spreads and angles: at a bound, at no spread and at a saturated probability gradients are torch's."""

from __future__ import annotations

import functools
import math
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._python_dispatch import _disable_current_modes

from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import like, reduced, translation, whole

aten = torch.ops.aten
_LOWEST = math.exp(-100)  # below it binary_cross_entropy takes -100 for the logarithm
_STEEPEST = 1e12  # and this for its slope


@functools.cache
def _keeps_gradient() -> bool:
    """Whether torch's clamp gives an element at a bound its whole gradient, as it did before torch 2.15."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        (slope,) = torch.autograd.grad(x.clamp(min=0), x)
        return bool(slope)


@translation(aten.clamp.default, aten.clamp_min.default)
def clamp(x, min=None, max=None):
    """One Clip, or none of an element's gradient at a bound; integers become floats where a bound is one."""
    if isinstance(min, float) or isinstance(max, float):
        x = x if x.dtype.is_floating_point() else op.Cast(x, to=int(ir.DataType.FLOAT))
    if x.dtype is None:  # of the cast: torch.onnx infers types later
        x.dtype = ir.DataType.FLOAT
    low, high = (None if bound is None else like(bound, x) for bound in (min, max))
    if not x.dtype.is_floating_point() or _keeps_gradient():
        return op.Clip(x, low, high)
    within = [*([] if low is None else [op.Greater(x, low)]), *([] if high is None else [op.Less(x, high)])]
    return op.Where(functools.reduce(op.And, within), x, op.Clip(record_node("Detach", [x]), low, high))


@translation(aten.clamp_max.default)
def clamp_max(x, max):
    """The upper bound alone."""
    return clamp(x, None, max)


@translation(aten.clamp.Tensor, aten.clamp_min.Tensor)
def clamp_by_tensors(x, min=None, max=None):
    """An element at a bound keeps its whole gradient, or shares it with the bound unless the bounds meet."""
    if _keeps_gradient():
        return _within(x, min, max)
    if min is None or max is None:
        return op.Min(x, max) if min is None else op.Max(x, min)
    return op.Where(op.Less(min, max), op.Min(op.Max(x, min), max), _within(x, min, max))


def _within(x: Any, low: Any, high: Any) -> Any:
    if low is not None:
        x = op.Where(_or_is_none(op.Less(x, low), low), low, x)
    return x if high is None else op.Where(_or_is_none(op.Greater(x, high), high), high, x)


def _or_is_none(exceeded: Any, bound: Any) -> Any:
    """Where a bound is exceeded, or is no number: then the result is none."""
    return op.Or(exceeded, op.IsNaN(bound)) if bound.dtype.is_floating_point() else exceeded


@translation(aten.clamp_max.Tensor)
def clamp_max_by_tensor(x, max):
    """The upper bound alone."""
    return clamp_by_tensors(x, None, max)


@translation(aten.hardtanh.default)
def hardtanh(x, min_val=-1.0, max_val=1.0):
    """An element at a bound has no gradient, and what is no number has one."""
    low, high = like(min_val, x), like(max_val, x)
    above = op.Where(op.LessOrEqual(x, low), low, x)
    return op.Where(op.GreaterOrEqual(x, high), high, above)


@translation(aten.relu6.default)
def relu6(x):
    """Nor has it at 0 and at 6."""
    return hardtanh(x, 0.0, 6.0)


@translation(aten.binary_cross_entropy.default)
def binary_cross_entropy(x, target, weight=None, reduction=1):
    """A probability that is exactly right has no gradient, and one that is exactly wrong a finite one."""
    wrong = op.Sub(like(1, x), x)
    loss = op.Neg(op.Add(op.Mul(target, _logarithm(x)), op.Mul(op.Sub(like(1, x), target), _logarithm(wrong))))
    return reduced(loss if weight is None else op.Mul(loss, weight), reduction)


def _logarithm(x: Any) -> Any:
    """-100 and steep where it would be less."""
    flat = op.LessOrEqual(x, like(_LOWEST, x))
    steep = op.Sub(op.Mul(x, like(_STEEPEST, x)), like(100, x))
    return op.Where(flat, steep, op.Log(op.Where(flat, like(1, x), x)))


@translation(aten.std.correction)
def standard_deviation(x, dim=None, correction=1, keepdim=False):
    """Its gradient is 0, not infinite, where all elements are equal."""
    axes = op.Constant(value_ints=list(dim) if dim and len(x.shape) else list(range(len(x.shape))))
    off = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    count = op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=0)
    freedom = op.Max(op.Sub(op.CastLike(count, x), like(correction, x)), like(0, x))
    variance = op.Div(op.ReduceSum(op.Mul(off, off), axes, keepdims=int(keepdim)), freedom)
    none = op.Equal(variance, like(0, x))
    return op.Where(none, like(0, x), op.Sqrt(op.Where(none, like(1, x), variance)))


@translation(aten.std_mean.correction)
def deviation_and_mean(x, dim=None, correction=1, keepdim=False):
    """The same, and the mean."""
    axes = op.Constant(value_ints=list(dim) if dim and len(x.shape) else list(range(len(x.shape))))
    return standard_deviation(x, dim, correction, keepdim), op.ReduceMean(x, axes, keepdims=int(keepdim))


@translation(aten.atan2.default)
def angle(y, x):
    """The arctangent of the smaller side by the larger; where both are 0 there is no gradient."""
    below, left = _is_negative(y), _is_negative(x)
    high, wide = op.Where(below, op.Neg(y), y), op.Where(left, op.Neg(x), x)
    steep = op.Greater(high, wide)
    less, more = op.Where(steep, wide, high), op.Where(steep, high, wide)
    none, alike = op.Equal(more, like(0, x)), op.And(op.IsInf(high), op.IsInf(wide))
    less = op.Mul(op.Where(alike, like(1, x), less), op.CastLike(op.Not(none), x))
    ratio = op.Div(less, op.Where(op.Or(none, alike), like(1, x), more))
    turned = op.Where(steep, op.Sub(like(math.pi / 2, x), op.Atan(ratio)), op.Atan(ratio))
    turned = op.Where(left, op.Sub(like(math.pi, x), turned), turned)
    return op.Where(below, op.Neg(turned), turned)


@translation(aten.signbit.default)
def has_sign(x):
    """Whether a number is below 0; the floating zero may be."""
    return _is_negative(x) if x.dtype.is_floating_point() else op.Less(x, like(0, x))


def _is_negative(x: Any) -> Any:
    """Below 0, or the zero with a sign."""
    return op.Or(op.Less(x, like(0, x)), op.Less(op.Reciprocal(x), like(0, x)))


@whole(aten.sinc.default)
def has_no_value_at_zero(node: torch.fx.Node) -> bool:
    """The formula divides by 0 there, and its gradient is no number."""
    return True
