"""What the nodes above early values say of them: masks that were expanded, indices that count the batch."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes

Value = ir.Value


def unexpanded(value: Value) -> Value:
    """The value that a mask was expanded and cast from, where it has as many axes."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in ("Expand", "Cast") and node.inputs[0] is not None:
        inner = node.inputs[0]
        if shapes.dims_of(inner) is None or shapes.rank(inner) != shapes.rank(value):
            break
        value, node = inner, inner.producer()
    return value


def places(indices: Value, batch_dims: int) -> Value | None:
    """The place of one token for each sequence: all indices behind the batch, or beside a count of it."""
    if batch_dims == 1:
        return indices if all(d == 1 for d in shapes.known_dims(indices)[1:]) else None
    return _last_column(indices) if batch_dims == 0 else None


def _last_column(indices: Value) -> Value | None:
    """The second of two columns of indices whose first counts the batch: ``[[0, p0], [1, p1], ...]``."""
    node = indices.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or shapes.rank(indices) != 2:
        return None
    first, second = node.inputs
    assert first is not None
    return second if _counts(first) else None


def _counts(value: Value) -> bool:
    """Whether a value is 0, 1, 2, ... under views."""
    node = value.producer()
    while node is not None and node.op_type in ("Unsqueeze", "Reshape", "Expand", "Cast", "Squeeze"):
        if node.inputs[0] is None:
            return False
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Range":
        return False
    start, step = (shapes.data_of(node.inputs[i]) for i in (0, 2))
    return start == 0 and step == 1
