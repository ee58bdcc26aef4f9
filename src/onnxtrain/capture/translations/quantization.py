"""Quantization that is only simulated: values rounded to what integers of a scale can say."""

from __future__ import annotations

import torch

from onnxtrain.capture import fake_quantization, quantized_layers  # noqa: F401  (they define the operators)
from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import translation


@translation(torch.ops.onnxtrain.fake_quantize.default)
def fake_quantize(x, scale, zero_point, axis, quant_min, quant_max):
    """One FakeQuant node, whose scale and zero point have as many axes as the values they are for, and no gradient."""
    rank = len(x.shape)
    form = [-1 if axis is not None and i == axis % rank else 1 for i in range(rank)]
    given = [op.CastLike(op.Reshape(v, op.Constant(value_ints=form)), x) for v in (scale, zero_point)]
    given = [record_node("Detach", [v]) for v in given]
    return record_node("FakeQuant", [x, *given], {"quant_min": quant_min, "quant_max": quant_max})


@translation(torch.ops.onnxtrain.matmul_4bit.default)
def matmul_4bit(x, packed, absmax, shape, block_size, quant_type):
    """One MatMulBnb4 node."""
    form = {"shape": list(shape), "block_size": block_size, "quant_type": quant_type}
    return record_node("MatMulBnb4", [x, packed, absmax], form)


@translation(torch.ops.onnxtrain.matmul_int8_weight.default)
def matmul_int8_weight(x, weight, scale):
    """One MatMulInt8Weight node."""
    return record_node("MatMulInt8Weight", [x, weight, scale])
