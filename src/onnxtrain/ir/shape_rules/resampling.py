"""Resizing, and sampling at given places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.sizes import dims_from
from onnxtrain.ir.shapes import (
    Dim,
    Facts,
    attribute,
    constant_of,
    data_of,
    dtype_of,
    fresh_dim,
    known_dims,
    operand,
    shape_rule,
    simplify,
)


def resized_counts(
    lengths: Sequence[int],
    scales: Sequence[float] | None,
    sizes: Sequence[int] | None,
    policy: str = "stretch",
    roi: Sequence[float] | None = None,
) -> tuple[list[int], list[float]]:
    """Sizes and factors of the resized axes: from factors, from sizes, or from one factor that keeps proportions.

    Args:
        lengths: sizes of the operand along these axes.
        scales: their factors; None or empty where ``sizes`` are stated.
        sizes: the sizes wanted.
        policy: stretch, not_larger or not_smaller.
        roi: starts and then ends of a crop, which the factors are applied to.
    """
    if scales:
        parts = [1.0] * len(lengths) if roi is None else [b - a for a, b in zip(roi, roi[len(lengths) :], strict=False)]
        exact = zip(lengths, parts, scales, strict=True)
        return [math.floor(np.float32(n) * np.float32(p) * np.float32(s)) for n, p, s in exact], list(scales)
    assert sizes is not None
    ratios = [c / n if n else 1.0 for c, n in zip(sizes, lengths, strict=True)]
    if policy == "stretch":
        return list(sizes), ratios
    one = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(one * n + 0.5) for n in lengths], [one] * len(lengths)


@shape_rule("Resize")
def resize(node: ir.Node) -> Sequence[Facts]:
    """Stated sizes, or the operand's times factors, rounded down."""
    x, sizes = node.inputs[0], operand(node, 3)
    assert x is not None
    dims = list(known_dims(x))
    given = [a % len(dims) for a in attribute(node, "axes") or range(len(dims))]
    factors, wanted = constant_of(operand(node, 2)), data_of(sizes)
    crop = attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize"
    stretch = attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    for position, axis in enumerate(given):
        fresh = fresh_dim(node.outputs[0], axis)
        if factors is not None and factors.size:
            made = None if crop else _scaled(dims[axis], float(factors.reshape(-1)[position]))
        else:
            made = wanted[position] if stretch and isinstance(wanted, tuple) else None
        dims[axis] = fresh if made is None or not (isinstance(made, int) or made.value) else made
    return [Facts(dtype_of(x), tuple(dims))]


def _scaled(dim: Dim, factor: float) -> Dim | None:
    if factor == 1.0:
        return dim
    if isinstance(dim, int):
        return resized_counts([dim], [factor], None)[0][0]
    if factor.is_integer():
        return simplify(dim * int(factor))
    return simplify(dim // int(1 / factor)) if factor > 0 and (1 / factor).is_integer() else None


@shape_rule("ResizeGrad", domain=DOMAIN)
def resize_grad(node: ir.Node) -> Sequence[Facts]:
    """The rows of dy, in the sizes that the second operand holds."""
    dy, sizes = node.inputs[:2]
    assert dy is not None
    found = dims_from(sizes, node.outputs[0])
    return [Facts(dtype_of(dy), None if found is None else (known_dims(dy)[0], *found))]


@shape_rule("RoiAlignGrad", domain=DOMAIN)
def roi_align_grad(node: ir.Node) -> Sequence[Facts]:
    """The shape is the fourth operand's content."""
    dy, shape = node.inputs[0], node.inputs[3]
    assert dy is not None
    return [Facts(dtype_of(dy), dims_from(shape, node.outputs[0]))]
