"""Operators that lay out images and blocks."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.shape_rules.sizes import dims_from
from onnxtrain.ir.shapes import Dim, Facts, attribute, dtype_of, known_dims, product, quotient, shape_rule


@shape_rule("DepthToSpace")
def depth_to_space(node: ir.Node) -> Sequence[Facts]:
    """Channels become blocks of ``blocksize`` times ``blocksize`` elements."""
    n, c, h, w, b = _image(node)
    return [Facts(dtype_of(node.inputs[0]), (n, quotient(c, b * b), product((h, b)), product((w, b))))]  # type: ignore[arg-type]


@shape_rule("SpaceToDepth")
def space_to_depth(node: ir.Node) -> Sequence[Facts]:
    """Blocks become channels."""
    n, c, h, w, b = _image(node)
    return [Facts(dtype_of(node.inputs[0]), (n, product((c, b * b)), quotient(h, b), quotient(w, b)))]  # type: ignore[arg-type]


def _image(node: ir.Node) -> tuple[Dim, Dim, Dim, Dim, int]:
    n, c, h, w = known_dims(node.inputs[0])  # type: ignore[arg-type]
    return n, c, h, w, attribute(node, "blocksize")


@shape_rule("CenterCropPad")
def center_crop_pad(node: ir.Node) -> Sequence[Facts]:
    """The second operand holds the sizes of the axes that change."""
    x = node.inputs[0]
    assert x is not None
    dims = list(known_dims(x))
    sizes = dims_from(node.inputs[1], node.outputs[0])
    axes = attribute(node, "axes") or range(len(dims))
    if sizes is not None:
        for axis, size in zip(axes, sizes, strict=True):
            dims[axis % len(dims)] = size
    return [Facts(dtype_of(x), tuple(dims) if sizes is not None else None)]
