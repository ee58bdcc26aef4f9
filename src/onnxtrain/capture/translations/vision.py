"""Convolution, adaptive pooling and BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import guard_or_true

from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import number, translation, vector, whole

aten = torch.ops.aten


def _of_batch(write: Callable[[Any], Any], x: Any, places: int) -> Any:
    """What is written of images with so many axes of places; one image alone is a batch of one in between."""
    if len(x.shape) > places + 1:
        return write(x)
    first = op.Constant(value_ints=[0])
    return op.Squeeze(write(op.Unsqueeze(x, first)), first)


@translation(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
    """One Conv node, without a bias where there is none: torch.onnx would add zeros."""
    count = len(weight.shape) - 2
    strides, pads, apart = (list(v) * (count // len(v)) for v in (stride, padding, dilation))
    attributes = {"strides": strides, "pads": pads * 2, "dilations": apart, "group": groups}
    return _of_batch(lambda x: record_node("Conv", [x, weight, bias], attributes, domain=""), x, count)


@translation(aten.convolution.default)
def convolution_either_way(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """One Conv, or one ConvTranspose."""
    if not transposed:
        return convolution(x, weight, bias, stride, padding, dilation, groups)
    count = len(weight.shape) - 2
    strides, pads, apart, behind = (list(v) * (count // len(v)) for v in (stride, padding, dilation, output_padding))
    attributes = {"strides": strides, "pads": pads * 2, "dilations": apart, "output_padding": behind, "group": groups}
    return _of_batch(lambda x: op.ConvTranspose(x, weight, bias, **attributes), x, count)


@translation(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def transposed_convolution(
    x, weight, bias=None, stride=(1,), padding=(0,), output_padding=(0,), groups=1, dilation=(1,)
):
    """One ConvTranspose."""
    return convolution_either_way(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


@translation(aten.max_pool2d.default)
def max_pool(x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    """One MaxPool."""
    kernel, pads, apart = (list(v) * (2 // len(v)) for v in (kernel_size, padding, dilation))
    strides = list(stride) * (2 // len(stride)) if stride else kernel
    attributes = {"strides": strides, "pads": pads * 2, "dilations": apart, "ceil_mode": int(ceil_mode)}
    return _of_batch(lambda x: op.MaxPool(x, kernel_shape=kernel, **attributes)[0], x, 2)


@translation(aten.upsample_bilinear2d.vec)
def upsample_bilinear(x, size, align_corners, scales):
    """One Resize, by scales or to sizes."""
    corners = "align_corners" if align_corners else "half_pixel"
    attributes = {"mode": "linear", "coordinate_transformation_mode": corners, "nearest_mode": "floor"}
    if scales is not None:
        return op.Resize(x, None, op.Constant(value_floats=[1.0, 1.0, *scales]), None, **attributes)
    sizes = op.Concat(op.Shape(x, start=0, end=2), vector(size), axis=0)
    return op.Resize(x, None, None, sizes, **attributes)


@translation(aten.bernoulli.p)
def bernoulli(x, p, generator=None):
    """Ones with a probability: where a uniform number is smaller."""
    if not x.dtype.is_floating_point() or generator is not None:
        return NotImplemented
    drawn = op.Less(op.RandomUniformLike(x, dtype=ir.DataType.FLOAT), number(p))
    return op.Cast(drawn, to=x.dtype)


_ADAPTIVE = ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d")
_ADAPTIVE += ("adaptive_max_pool2d", "adaptive_max_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
_AVERAGES = [getattr(aten, name).default for name in _ADAPTIVE if "avg" in name]


@whole(*(getattr(aten, name).default for name in _ADAPTIVE))
def is_windowed(node: torch.fx.Node) -> bool:
    """Adaptive pooling stays an ATen node: torch.onnx would fix the window for the size of the example."""
    return node.target not in _AVERAGES or any(not isinstance(s, int) or s != 1 for s in node.args[1])


@whole(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def is_rounded_up(node: torch.fx.Node) -> bool:
    """Windows beyond the padding (ceil_mode) are averaged otherwise in ONNX, which knows no divisor of one's own."""
    named = dict(zip(("ceil_mode", "count_include_pad", "divisor_override"), node.args[4:], strict=False)) | node.kwargs
    return bool(named.get("ceil_mode")) or named.get("divisor_override") is not None


@whole(aten.pad.default)
def pads_what_is_cut(node: torch.fx.Node) -> bool:
    """Negative padding cuts: torch takes edges and mirrors of what there was before, ONNX of what is left."""
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    return mode != "constant" and any(isinstance(p, int) and p < 0 for p in node.args[1])


@whole(aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default)
def has_a_scale_of_its_own(node: torch.fx.Node) -> bool:
    """Torch's smoothing kernel follows a scale that is given, or the distance of corners, ONNX's the sizes."""
    return bool(node.args[2]) or any(scale is not None for scale in (*node.args[3:], *node.kwargs.values()))


_RESIZED = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d")
_RESIZED += ("_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
_RESIZED += ("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")


@whole(*(getattr(aten, name).vec for name in _RESIZED), or_apart=True)
def has_a_scale_in_double_precision(node: torch.fx.Node) -> bool:
    """Resize has scales in float32: of others sizes and nearest places come out differently, and weights of doubles."""
    return any(s != float(np.float32(s)) for s in _scales(node))


@whole(aten.upsample_linear1d.vec, or_apart=True)
def may_leave_the_size(node: torch.fx.Node) -> bool:
    """Taken apart, an axis that a scale leaves as it is would be interpolated, where torch copies it."""
    return has_a_scale_in_double_precision(node) or any(1 < s < 1.5 for s in _scales(node))


def _scales(node: torch.fx.Node) -> list[float]:
    """The factors by which images are resized, those that are numbers; they come last."""
    scales: Any = node.kwargs.get("scale_factors", node.args[-1])
    return [s for s in scales if isinstance(s, float)] if isinstance(scales, list | tuple) else []


@whole(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def may_be_empty(node: torch.fx.Node) -> bool:
    """A size of 0 is computed there, which ONNX's Reshape takes for a size to be copied."""
    return any(guard_or_true(size == 0) for size in node.meta["val"].shape)


@translation(*_AVERAGES)
def average(x, size):
    """The mean over all places, where one is asked for."""
    return op.ReduceMean(x, op.Constant(value_ints=list(range(-len(size), 0))), keepdims=1)


def _filled(like: Any, value: float) -> Any:
    """A constant in the shape and type of another value."""
    return op.Expand(op.CastLike(number(value), like), op.Shape(like))


@translation(aten._native_batch_norm_legit_functional.default)
def batch_norm_training(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """Batch statistics and updated running statistics in train mode, as torch computes them."""
    weight = _filled(running_mean, 1.0) if weight is None else weight
    bias = _filled(running_mean, 0.0) if bias is None else bias
    if not training:
        y = op.BatchNormalization(x, weight, bias, running_mean, running_var, epsilon=eps)
        nothing = op.CastLike(op.Constant(value_floats=[]), x)
        return y, nothing, nothing, op.Identity(running_mean), op.Identity(running_var)
    y, new_mean, new_var, mean, inv_std = record_node(
        "BatchNormTraining",
        [x, weight, bias, running_mean, running_var],
        {"epsilon": float(eps), "momentum": float(momentum)},
        outputs=5,
    )
    return y, mean, inv_std, new_mean, new_var


@whole(aten._batch_norm_with_update_functional.default)
def gives_no_gradient_to_statistics(node: torch.fx.Node) -> bool:
    """The mean and deviation that it returns have no gradient in torch; in the calls that it is made of they have."""
    return True


@translation(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(x, weight, bias, training, momentum, eps):
    """Batch statistics alone, where no running ones are kept."""
    channels = op.Shape(x, start=1, end=2)
    mean, var = (op.Expand(op.CastLike(number(v), x), channels) for v in (0.0, 1.0))
    y, mean, inv_std, _, _ = batch_norm_training(x, weight, bias, mean, var, True, momentum, eps)
    return y, mean, inv_std
