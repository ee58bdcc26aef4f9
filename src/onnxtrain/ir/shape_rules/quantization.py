"""Quantization: the operand's shape; types as the zero point and the scale have them, double included."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Facts, attribute, dims_of, dtype_of, known_dims, operand, shape_rule


@shape_rule("QuantizeLinear")
def quantize(node: ir.Node) -> Sequence[Facts]:
    """The zero point's type; without one ``output_dtype``, or uint8."""
    zero_point = operand(node, 2)
    stated = ir.DataType(attribute(node, "output_dtype", 0) or ir.DataType.UINT8)
    return [Facts(stated if zero_point is None else dtype_of(zero_point), dims_of(node.inputs[0]))]  # type: ignore[arg-type]


@shape_rule("DequantizeLinear")
def dequantize(node: ir.Node) -> Sequence[Facts]:
    """The scale's type."""
    return [Facts(dtype_of(node.inputs[1]), dims_of(node.inputs[0]))]  # type: ignore[arg-type]


@shape_rule("DynamicQuantizeLinear")
def dynamic_quantize(node: ir.Node) -> Sequence[Facts]:
    """Bytes, their scale and their zero point."""
    x = node.inputs[0]
    assert x is not None
    byte = ir.DataType.UINT8
    return [Facts(byte, dims_of(x)), Facts(dtype_of(x), ()), Facts(byte, ())]


@shape_rule("DequantizeBnb4", domain=DOMAIN)
def dequantize_4bit(node: ir.Node) -> Sequence[Facts]:
    """The weight's shape, which is stated."""
    return [Facts(dtype_of(node.inputs[1]), tuple(attribute(node, "shape", ())))]  # type: ignore[arg-type]


@shape_rule("MatMulBnb4", "MatMulBnb4Grad", domain=DOMAIN)
def matmul_4bit(node: ir.Node) -> Sequence[Facts]:
    """The last axis becomes the weight's other one."""
    x = node.inputs[0]
    assert x is not None
    width = attribute(node, "shape", ())[0 if node.op_type == "MatMulBnb4" else 1]
    return [Facts(dtype_of(x), (*known_dims(x)[:-1], width))]


@shape_rule("MatMulInt8Weight", "MatMulInt8WeightGrad", domain=DOMAIN)
def matmul_8bit(node: ir.Node) -> Sequence[Facts]:
    """The last axis becomes the weight's other one."""
    x, weight = node.inputs[:2]
    assert x is not None and weight is not None
    width = known_dims(weight)[0 if node.op_type == "MatMulInt8Weight" else 1]
    return [Facts(dtype_of(x), (*known_dims(x)[:-1], width))]
