"""ONNX's STFT written out; shapes as in Operators.md."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder

Value = ir.Value


def short_time_fourier_transform(op: Builder, node: ir.Node) -> list[Value]:
    """The frames of the signal (batch, length[, 1 or 2]) times the window, each transformed along its length."""
    signal, step, window, length = (shapes.operand(node, i) for i in range(4))
    assert signal is not None and step is not None
    if shapes.rank(signal) == 2:
        signal = op.Unsqueeze(signal, op.ints(2))
    step, total = _scalar(op, step), op.Squeeze(op.size(signal, 1), op.ints(0))
    if length is not None:
        length = _scalar(op, length)
    else:
        length = total if window is None else op.Squeeze(op.size(window, 0), op.ints(0))
    zero, one = op.constant(0), op.constant(1)
    starts = op.Mul(op.Range(zero, op.Add(op.Div(op.Sub(total, length), step), one), one), step)
    places = op.Add(op.Unsqueeze(starts, op.ints(1)), op.Unsqueeze(op.Range(zero, length, one), op.ints(0)))
    frames = op.Gather(signal, places, axis=1)
    if window is not None:
        frames = op.Mul(frames, op.Unsqueeze(window, op.ints(1)))
    return [op.DFT(frames, None, op.constant(2), onesided=shapes.attribute(node, "onesided", 1))]


def _scalar(op: Builder, value: Value) -> Value:
    """An integer of any type, or a vector of one, as an int64 scalar."""
    return op.cast(op.Reshape(value, op.constant([], ir.DataType.INT64)), ir.DataType.INT64)
