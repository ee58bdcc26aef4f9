"""What the nodes above early values say of them: masks that were expanded, labels that a mask is made of, and how
indices of tokens are made.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes

Value = ir.Value
_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")  # of the same elements in the same order


def unexpanded(value: Value) -> Value:
    """The value that a mask was expanded and cast from, where it has as many axes."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in ("Expand", "Cast") and node.inputs[0] is not None:
        inner = node.inputs[0]
        if shapes.dims_of(inner) is None or shapes.rank(inner) != shapes.rank(value):
            break
        value, node = inner, inner.producer()
    return value


def unviewed(value: Value) -> Value:
    """The value that a value is a view of, with the same elements in the same order."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def compared_labels(mask: Value) -> tuple[Value, int, bool] | None:
    """The labels that a mask compares with a constant, the constant, and whether the mask is true where they are equal;
    None where it is made in another way.
    """
    is_equal, value = True, unviewed(mask)
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in ("Cast", "Not"):
        inner = node.inputs[0]
        if inner is None or inner.dtype != ir.DataType.BOOL:
            return None
        is_equal, value = is_equal != (node.op_type == "Not"), unviewed(inner)
        node = value.producer()
    if node is None or node.domain or node.op_type != "Equal":
        return None
    labels, ignored = node.inputs[0], shapes.constant_of(node.inputs[1])
    if labels is None or ignored is None or ignored.size != 1 or ignored.dtype.kind != "i":
        return None
    return unviewed(labels), int(ignored.reshape(())), is_equal


def chosen_by(indices: Value) -> Value | None:
    """The mask whose true elements are read, in order, where indices of GatherND are made from one: ``x[mask]``."""
    node = indices.producer()
    if node is None or node.domain or node.op_type not in ("Transpose", "Reshape") or node.inputs[0] is None:
        return None
    found, dims = node.inputs[0].producer(), shapes.known_dims(indices)
    if found is None or found.domain or found.op_type != "NonZero" or len(dims) != 2:
        return None
    mask = found.inputs[0]
    if mask is None or shapes.dims_of(mask) is None or shapes.rank(mask) != dims[1]:
        return None
    return mask if node.op_type == "Transpose" or dims[1] == 1 else None


def places(indices: Value, batch_dims: int, batch: shapes.Dim) -> Value | None:
    """The place of one token for each sequence: all indices behind the batch, or beside a count of it.

    Args:
        indices: of GatherND.
        batch_dims: its attribute.
        batch: how many sequences there are.
    """
    if batch_dims == 1:
        return indices if all(d == 1 for d in shapes.known_dims(indices)[1:]) else None
    return _last_column(indices, batch) if batch_dims == 0 else None


def _last_column(indices: Value, batch: shapes.Dim) -> Value | None:
    """The second of two columns of indices whose first counts the batch: ``[[0, p0], [1, p1], ...]``."""
    node = indices.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or shapes.rank(indices) != 2:
        return None
    first, second = node.inputs
    assert first is not None
    return second if shapes.known_dims(first)[0] == batch and _counts(first, batch) else None


def _counts(value: Value, batch: shapes.Dim) -> bool:
    """Whether a value is 0, 1, 2, ... under views, each of a number of sequences once."""
    node = value.producer()
    while node is not None and node.op_type in ("Unsqueeze", "Reshape", "Expand", "Cast", "Squeeze"):
        if node.inputs[0] is None:
            return False
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Range":
        return False
    start, step = (shapes.data_of(node.inputs[i]) for i in (0, 2))
    return start == 0 and step == 1 and shapes.known_dims(node.outputs[0]) == (batch,)
