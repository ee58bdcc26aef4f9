"""Fourier transforms, and the windows and filters that come with them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

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


@shape_rule("DFT")
def dft(node: ir.Node) -> Sequence[Facts]:
    """Pairs along the last axis; the transformed one has the stated length, about half of it where one-sided."""
    x, length = node.inputs[0], operand(node, 1)
    assert x is not None
    dims, out = list(known_dims(x)), node.outputs[0]
    axis = constant_of(operand(node, 2)) if operand(node, 2) is not None else -2
    if axis is None:
        return [Facts(dtype_of(x), (*(fresh_dim(out, i) for i in range(len(dims) - 1)), 2))]
    at = int(axis) % len(dims)
    if length is not None:
        dims[at] = _number(node, 1, at)
    if attribute(node, "onesided", 0):
        dims[at] = _half(dims[at])
    return [Facts(dtype_of(x), (*dims[:-1], 2))]


def _half(size: Dim) -> Dim:
    return size // 2 + 1 if isinstance(size, int) else simplify(size // 2 + 1)


def _number(node: ir.Node, index: int, axis: int) -> Dim:
    """The content of an integer operand as the size of an axis of the output."""
    stated = data_of(operand(node, index))
    return fresh_dim(node.outputs[0], axis) if stated is None or isinstance(stated, tuple) else stated


@shape_rule("HannWindow", "HammingWindow", "BlackmanWindow")
def window(node: ir.Node) -> Sequence[Facts]:
    """As long as the operand says."""
    return [Facts(ir.DataType(attribute(node, "output_datatype", 1)), (_number(node, 0, 0),))]


@shape_rule("MelWeightMatrix")
def mel_weight_matrix(node: ir.Node) -> Sequence[Facts]:
    """A row for each bin of a one-sided transform, a column for each filter."""
    dims = (_half(_number(node, 1, 0)), _number(node, 0, 1))
    return [Facts(ir.DataType(attribute(node, "output_datatype", 1)), dims)]
