"""Weights that are stored as integers, made ready for quantization-aware training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.ir import shapes
from onnxtrain.ir.reading import Source, load

_SUFFIX = "_quantized"  # how onnxruntime's quantizer ends the names of integers
_QUANTIZED = frozenset((ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8))
_QUANTIZED |= {ir.DataType.INT16, ir.DataType.UINT16}  # what QuantizeLinear makes


def dequantize_weights(model: Source) -> onnx.ModelProto:
    """The model with floating weights where it has integers behind ``DequantizeLinear``: they can be trained.

    A model as ``onnxruntime.quantization.quantize_static(quant_format=QuantFormat.QDQ)`` writes it computes the same
    afterwards: a weight ``w_quantized`` becomes the initializer ``w``, which ``QuantizeLinear`` rounds with the scale
    of before. Training then sees what rounding does, and a runtime that folds constants has the integers again.
    Integers of 32 bits, as biases are, become floats that are not rounded. Integers in blocks, or read with several
    scales, are left as they are.

    Args:
        model: path of the ``.onnx`` file, or the model; it is not changed.

    Raises:
        ArtifactError: the model has no such weight.
        GraphError: the model cannot be read.
    """
    made = load(model)
    found = [v for v in made.graph.initializers.values() if _is_quantized_weight(v)]
    if not found:
        raise ArtifactError(
            "the model has no weight that is stored as integers behind DequantizeLinear",
            cure="train it as it is, or quantize it with quant_format=QuantFormat.QDQ",
        )
    for value in found:
        _dequantize(made.graph, value)
    return ir.to_proto(made)


def _is_quantized_weight(value: ir.Value) -> bool:
    """Whether all that reads an initializer makes floats of it, with one constant scale and not in blocks."""
    nodes = [use.node for use in value.uses() if use.idx == 0]
    if not nodes or len(nodes) != len(value.uses()) or value.dtype not in {*_QUANTIZED, ir.DataType.INT32}:
        return False
    first = nodes[0]
    return all(
        n.domain == "" and n.op_type == "DequantizeLinear" and _settings(n) == _settings(first) for n in nodes
    ) and (shapes.constant_of(first.inputs[1]) is not None and not shapes.attribute(first, "block_size", 0))


def _settings(node: ir.Node) -> tuple[object, ...]:
    return (*(shapes.operand(node, i) for i in (1, 2)), shapes.attribute(node, "axis", 1))


def _dequantize(graph: ir.Graph, value: ir.Value) -> None:
    """Put a floating weight, and ``QuantizeLinear`` where its type allows, in the place of an initializer."""
    nodes = [use.node for use in value.uses()]
    whole = value.dtype == ir.DataType.INT32
    name = _name(graph, str(value.name), nodes if whole else [])
    weight = ir.val(name, const_value=ir.tensor(_content(value, nodes[0]), name=name))
    if whole:
        _replace(graph, nodes, weight)
    else:
        _round(graph, nodes, weight)
    graph.initializers.pop(str(value.name))
    graph.register_initializer(weight)


def _replace(graph: ir.Graph, nodes: Sequence[ir.Node], weight: ir.Value) -> None:
    """Let all read the weight itself."""
    settings = [v for node in nodes for v in node.inputs[1:] if v is not None]
    for node in nodes:
        node.outputs[0].replace_all_uses_with(weight, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        node.outputs[0].name = None
    for value in settings:
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)


def _round(graph: ir.Graph, nodes: Sequence[ir.Node], weight: ir.Value) -> None:
    """Let all read the weight in the integers that there were."""
    first = nodes[0]
    value, scale, zero = first.inputs[0], first.inputs[1], shapes.operand(first, 2)
    assert value is not None
    zero = zero or _zeros(graph, value, first)
    attributes = [a for n, a in first.attributes.items() if n == "axis"]
    made = ir.Node("", "QuantizeLinear", [weight, scale, zero], attributes=attributes, num_outputs=1)
    y = made.outputs[0]
    y.type, y.shape = value.type, value.shape
    for node in nodes:
        node.resize_inputs(3)
        node.replace_input_with(0, y)
        node.replace_input_with(2, zero)
    graph.insert_before(first, made)
    y.name = f"{weight.name}.integers"


def _content(value: ir.Value, node: ir.Node) -> np.ndarray:
    """``(integers - zero point) · scale``, by channel where there is a scale for each."""
    integers, scale = shapes.constant_of(value), shapes.constant_of(node.inputs[1])
    zero = shapes.constant_of(shapes.operand(node, 2))
    assert integers is not None and scale is not None
    form = [1] * integers.ndim
    if scale.ndim and scale.size > 1:
        form[shapes.attribute(node, "axis", 1)] = -1
    known = np.zeros(1) if zero is None else zero.astype(np.float64)
    offset = known.reshape(form if known.size > 1 else [1] * integers.ndim)
    return ((integers.astype(np.float64) - offset) * scale.astype(np.float64).reshape(form)).astype(scale.dtype)


def _zeros(graph: ir.Graph, value: ir.Value, node: ir.Node) -> ir.Value:
    """A zero point for a weight that has none: it tells QuantizeLinear the type."""
    scale = shapes.constant_of(node.inputs[1])
    assert scale is not None and value.dtype is not None
    zeros = ir.tensor(np.zeros(scale.shape, value.dtype.numpy()), value.dtype)
    made = ir.val(f"{value.name}_zeros", const_value=zeros)
    graph.register_initializer(made)
    return made


def _name(graph: ir.Graph, quantized: str, going: Sequence[ir.Node]) -> str:
    """The name that a weight had before it was quantized, where that is free once some nodes are gone."""
    made = {v.name for n in graph if n not in going for v in n.outputs}
    name = quantized.removesuffix(_SUFFIX)
    return f"{quantized}_float" if name in {*graph.initializers, *(v.name for v in graph.inputs)} | made else name
