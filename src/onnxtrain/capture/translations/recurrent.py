"""Recurrent layers: one RNN, GRU or LSTM node for each layer, both directions in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture import recurrent_layers  # noqa: F401  (defines the operators)
from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import number, translation, whole

aten = torch.ops.aten
_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}  # ONNX's order of gates in terms of torch's


def _translate(target: Any, kind: str, settings: Mapping[str, Any]) -> None:
    @translation(target)
    def layers(x, states, weights, lengths, has_biases, num_layers, dropout, train, bidirectional, batch_first) -> Any:
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _layers(kind, settings, x, states, weights, lengths, *options)


own = torch.ops.onnxtrain
_translate(own.lstm.default, "LSTM", {})
_translate(own.gru.default, "GRU", {"linear_before_reset": 1})  # torch resets after the product
_translate(own.rnn_tanh.default, "RNN", {})
_translate(own.rnn_relu.default, "RNN", {"activations": ["Relu"]})


@whole(aten.lstm.input)
def has_projections(node: torch.fx.Node) -> bool:
    """ONNX's LSTM has no projections; every other call is an operator of ours above."""
    return True


def _layers(
    kind: str,
    settings: Mapping[str, Any],
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Any],
    lengths: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """The output of the last layer, and the last states of all layers side by side."""
    directions = 2 if bidirectional else 1
    count = 4 if has_biases else 2
    hidden = weights[1].shape[1]
    settings = {k: v * directions if isinstance(v, list) else v for k, v in settings.items()}
    attributes = {**settings, "hidden_size": hidden, "direction": "bidirectional" if bidirectional else "forward"}
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    lengths = None if lengths is None else op.Cast(lengths, to=ir.DataType.INT32)
    last: list[list[Any]] = []
    for layer in range(layers):
        first = layer * directions
        own = [weights[(first + d) * count : (first + d + 1) * count] for d in range(directions)]
        rows = [op.Slice(s, [first], [first + directions], [0]) if layers > 1 else s for s in states]
        operands = [x, *_weights(kind, own, hidden), lengths, *rows]
        y, *ends = record_node(kind, operands, attributes, outputs=1 + len(states), domain="")
        last.append(ends)
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, directions * hidden])
        if dropout and train and layer < layers - 1:
            x = record_node("Dropout", [x, number(dropout), op.Constant(value=ir.tensor(True))], domain="")
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    return x, *(column[0] if layers == 1 else op.Concat(*column, axis=0) for column in zip(*last, strict=True))


def _weights(kind: str, own: Sequence[Sequence[Any]], hidden: int) -> list[Any]:
    """W, R and B of one layer, all directions, gates in ONNX's order."""
    columns = [[_ordered(kind, w, hidden) for w in column] for column in zip(*own, strict=True)]
    made = [_joined([op.Unsqueeze(w, [0]) for w in column], 0) for column in columns[:2]]
    if len(columns) == 2:
        return [*made, None]
    biases = [op.Unsqueeze(op.Concat(w, r, axis=0), [0]) for w, r in zip(columns[2], columns[3], strict=True)]
    return [*made, _joined(biases, 0)]


def _ordered(kind: str, weight: Any, hidden: int) -> Any:
    order = _ORDER[kind]
    if len(order) == 1:
        return weight
    sizes = op.Constant(value_ints=[hidden] * len(order))
    gates = record_node("Split", [weight, sizes], {"axis": 0}, outputs=len(order), domain="")
    return op.Concat(*(gates[g] for g in order), axis=0)


def _joined(parts: Sequence[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)
