"""Elementwise operators: the operands' shapes broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import Dim, Facts, broadcast, data_of, dims_of, dtype_of, shape_rule, simplify


@shape_rule("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor")
def compare(node: ir.Node) -> Sequence[Facts]:
    """Bool in the broadcast shape."""
    return [Facts(ir.DataType.BOOL, _broadcast(node, node.inputs))]


@shape_rule("Pow", "PRelu", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Sum", "Mean")
def arithmetic(node: ir.Node) -> Sequence[Facts]:
    """The first operand's type in the broadcast shape."""
    return [Facts(dtype_of(node.inputs[0]), _broadcast(node, node.inputs))]  # type: ignore[arg-type]


@shape_rule("Where")
def where(node: ir.Node) -> Sequence[Facts]:
    """The branches' type in the shape of condition and branches together."""
    dims = _broadcast(node, node.inputs)
    data = data_of(node.inputs[1])
    same = data is not None and data == data_of(node.inputs[2])
    return [Facts(dtype_of(node.inputs[1]), dims, data if same else None)]  # type: ignore[arg-type]


@shape_rule(
    *[
        "Identity",
        "Neg",
        "Abs",
        "Exp",
        "Log",
        "Sqrt",
        "Reciprocal",
        "Relu",
        "LeakyRelu",
        "Elu",
        "Celu",
        "Selu",
        "Gelu",
        "Erf",
        "Tanh",
        "Sigmoid",
        "HardSigmoid",
        "HardSwish",
        "Softplus",
        "Softsign",
        "Mish",
        "ThresholdedRelu",
        "Sin",
        "Cos",
        "Tan",
        "Asin",
        "Acos",
        "Atan",
        "Sinh",
        "Cosh",
        "Asinh",
        "Acosh",
        "Atanh",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "Clip",
        "Softmax",
        "LogSoftmax",
        "Hardmax",
        "CumSum",
        "CumProd",
        "Trilu",
        "LpNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "LRN",
        "MeanVarianceNormalization",
        "ScatterElements",
        "ScatterND",
        "Scatter",
        "Not",
        "BitwiseNot",
        "Shrink",
        "Swish",
        "SwiGLU",
        "ReverseSequence",
    ]
)
def unary(node: ir.Node) -> Sequence[Facts]:
    """Type and shape of the first operand."""
    x = node.inputs[0]
    assert x is not None
    data = data_of(x)
    if node.op_type == "Neg" and data is not None:
        data = tuple(_negated(d) for d in data) if isinstance(data, tuple) else _negated(data)
    elif node.op_type != "Identity":
        data = None
    return [Facts(dtype_of(x), dims_of(x), data)]


@shape_rule("IsNaN", "IsInf")
def predicate(node: ir.Node) -> Sequence[Facts]:
    """Bool in the operand's shape."""
    return [Facts(ir.DataType.BOOL, dims_of(node.inputs[0]))]  # type: ignore[arg-type]


@shape_rule("Dropout")
def dropout(node: ir.Node) -> Sequence[Facts]:
    """The operand's shape twice; the mask is bool."""
    x = node.inputs[0]
    assert x is not None
    return [Facts(dtype_of(x), dims_of(x)), Facts(ir.DataType.BOOL, dims_of(x))]


@shape_rule("RandomState", domain=DOMAIN)
def random_state(node: ir.Node) -> Sequence[Facts]:
    """What a generator needs to draw again, and what has no content but the operand's shape and strides: no memory."""
    x = node.inputs[0]
    assert x is not None
    return [Facts(ir.DataType.UINT8, None), Facts(dtype_of(x), None)]


@shape_rule("DropoutMask", domain=DOMAIN)
def dropout_mask(node: ir.Node) -> Sequence[Facts]:
    """Bool, of the shape that the second operand has when it runs."""
    return [Facts(ir.DataType.BOOL, None)]


@shape_rule("Offload", domain=DOMAIN)
def offload(node: ir.Node) -> Sequence[Facts]:
    """What stands for a value that waits elsewhere: no memory of its own."""
    return [Facts(ir.DataType.INT64, ())]


def _negated(dim: Dim) -> Dim:
    return simplify(dim * -1)


def _broadcast(node: ir.Node, values: Sequence[ir.Value | None]) -> tuple[Dim, ...] | None:
    shapes = [dims_of(v) for v in values if v is not None]
    return None if None in shapes else broadcast(*shapes, node=node)  # type: ignore[arg-type]
