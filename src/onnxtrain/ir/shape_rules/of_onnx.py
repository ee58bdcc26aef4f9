"""Operators without a rule: ONNX's own inference of shapes, node by node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.ir.graphs import describe, source_of
from onnxtrain.ir.shapes import OTHERS, Dim, Facts, constant_of, dims_of, dtype_of, fresh_dim, shape_rule


@shape_rule(OTHERS, domain=OTHERS)
def ask_onnx(node: ir.Node) -> Sequence[Facts]:
    """ONNX's own inference for a node without a rule; it answers nothing about tensors of a type that is not known."""
    version = node.version or (node.graph.opset_imports.get(node.domain, 20) if node.graph else 20)
    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return [_stated(v) for v in node.outputs]
    proto = ir.serde.serialize_node(node)
    given = [v for v in node.inputs if v is not None]
    if any(_is_of_no_type(v) for v in given):
        return [_stated(v) for v in node.outputs]
    types = {str(v.name): _type_proto(v) for v in given}
    data = {
        str(v.name): onnx.numpy_helper.from_array(a)
        for v in given
        if (a := constant_of(v)) is not None and a.size < 1024
    }
    opsets = [onnx.helper.make_opsetid(node.domain, version)]
    try:
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=opsets, ir_version=10)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:  # sizes, or element types
        raise ShapeError(str(error).strip(), node=describe(node), source=source_of(node)) from error
    return [_from_proto(v, found.get(v.name or "")) for v in node.outputs]


def _stated(value: ir.Value) -> Facts:
    return Facts(value.dtype or ir.DataType.UNDEFINED, dims_of(value))


def _is_of_no_type(value: ir.Value) -> bool:
    """Whether a tensor's element type is not known."""
    return (value.type is None or isinstance(value.type, ir.TensorType)) and not value.dtype


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return ir.serde.serialize_type(value.type)
    dims = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    return onnx.helper.make_tensor_type_proto(int(dtype_of(value)), dims)


def _from_proto(value: ir.Value, proto: onnx.TypeProto | None) -> Facts:
    if proto is None or not proto.HasField("tensor_type"):
        if proto is not None and (proto.HasField("sequence_type") or proto.HasField("optional_type")):
            value.type = ir.serde.deserialize_type_proto_for_type(proto)
        return Facts(ir.DataType.UNDEFINED, None)
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Facts(ir.DataType(tensor.elem_type), None)
    dims: list[Dim] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value)
        else:
            dims.append(ir.SymbolicDim(dim.dim_param) if dim.dim_param else fresh_dim(value, axis))
    return Facts(ir.DataType(tensor.elem_type), tuple(dims))
