"""Quantization: a value made an integer and back again is one operator in floating point, which has a gradient."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import replace
from onnxtrain.ir.builder import Builder


class FakeQuantPass(ir.passes.InPlacePass):
    """``DequantizeLinear(QuantizeLinear(x))`` with one scale and zero point becomes FakeQuant."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            if node.domain == "" and node.op_type == "DequantizeLinear":
                modified |= _fuse(model.graph, node)
        return ir.passes.PassResult(model, modified)


def _fuse(graph: ir.Graph, node: ir.Node) -> bool:
    before = None if node.inputs[0] is None else node.inputs[0].producer()
    if before is None or before.domain or before.op_type != "QuantizeLinear":
        return False
    if not _agree(before, node):
        return False
    x, scale = before.inputs[0], before.inputs[1]
    bounds = _bounds(shapes.dtype_of(node.inputs[0]))  # type: ignore[arg-type]
    if x is None or scale is None or bounds is None or shapes.dtype_of(scale) != shapes.dtype_of(x):
        return False
    op = Builder(graph, before=node)
    op.metadata = dict(node.metadata_props)
    zero = shapes.operand(node, 2)
    zero = op.like(0.0, x) if zero is None else op.cast(zero, shapes.dtype_of(x))
    axis, rank = shapes.attribute(node, "axis", 1), shapes.rank(x)
    if shapes.rank(scale) == 1 and rank:
        form = op.ints(*(-1 if i == axis % rank else 1 for i in range(rank)))
        scale = op.Reshape(scale, form)
        zero = op.Reshape(zero, form) if shapes.rank(zero) else zero
    replace(graph, node, [op.FakeQuant(x, scale, zero, quant_min=bounds[0], quant_max=bounds[1])])
    return True


def _agree(quantize: ir.Node, dequantize: ir.Node) -> bool:
    """Whether both have the same scale, zero point and axis, and no blocks."""
    same = all(shapes.operand(quantize, i) is shapes.operand(dequantize, i) for i in (1, 2))
    axes = shapes.attribute(quantize, "axis", 1) == shapes.attribute(dequantize, "axis", 1)
    return same and axes and not shapes.attribute(quantize, "block_size", 0)


def _bounds(dtype: ir.DataType) -> tuple[int, int] | None:
    """The least and the largest integer of a type; None for floating types."""
    if not dtype.is_integer():
        return None
    if dtype.bitwidth < 8:
        signed = dtype.is_signed()
        return (-(1 << dtype.bitwidth - 1), (1 << dtype.bitwidth - 1) - 1) if signed else (0, (1 << dtype.bitwidth) - 1)
    found = np.iinfo(dtype.numpy())
    return int(found.min), int(found.max)
