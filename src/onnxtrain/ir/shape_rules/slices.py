"""Slice: its sizes, and what it takes out of content that is known."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.shape_rules.sizes import axes_of
from onnxtrain.ir.shapes import (
    Data,
    Dim,
    Facts,
    data_of,
    dtype_of,
    fresh_dim,
    known_dims,
    operand,
    shape_rule,
    simplify,
)


@shape_rule("Slice")
def slice_(node: ir.Node) -> Sequence[Facts]:
    """Per axis ``ceil((end - start) / step)`` with ONNX's clamping."""
    x = node.inputs[0]
    assert x is not None
    dims = list(known_dims(x))
    starts, ends = data_of(node.inputs[1]), data_of(node.inputs[2])
    axes = axes_of(node, 3)
    steps = data_of(operand(node, 4))
    if not isinstance(starts, tuple) or not isinstance(ends, tuple):
        touched = range(len(dims)) if operand(node, 3) is not None and axes is None else axes or range(len(dims))
        for axis in touched:
            dims[axis] = fresh_dim(node.outputs[0], axis % len(dims))
        return [Facts(dtype_of(x), tuple(dims))]
    axes = axes if axes is not None else tuple(range(len(starts)))
    steps = steps if isinstance(steps, tuple) else (1,) * len(starts)
    data = data_of(x)
    sliced: Data | None = None
    if isinstance(data, tuple) and all(isinstance(v, int) for v in (*starts, *ends, *steps)):
        sliced = data[slice(starts[0], _clip(ends[0]), steps[0])]  # type: ignore
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(dims)
        length = _sliced(dims[axis], start, end, step, _may_be_empty(dims[axis], node))
        dims[axis] = fresh_dim(node.outputs[0], axis) if length is None else length
    return [Facts(dtype_of(x), tuple(dims), sliced)]


def _clip(end: Dim) -> int | None:
    return None if isinstance(end, int) and abs(end) > 2**31 else end  # type: ignore[return-value]


def _may_be_empty(dim: Dim, node: ir.Node) -> bool:
    """Whether an axis may have no element: the graph's inputs have some, what content decides on may be nothing."""
    if isinstance(dim, int):
        return dim == 0
    given = () if node.graph is None else node.graph.inputs
    dims = [d for v in given for d in v.shape or () if isinstance(d, ir.SymbolicDim)]
    return dim.value is None or not dim.free_symbols() <= set().union(*(d.free_symbols() for d in dims))


def _sliced(dim: Dim, start: Dim, end: Dim, step: Dim, may_be_empty: bool) -> Dim | None:
    if isinstance(dim, int) and all(isinstance(v, int) for v in (start, end, step)):
        return len(range(dim)[slice(start if step > 0 else max(start, -dim), end, step)])  # type: ignore
    if step != 1:
        return None
    huge = isinstance(end, int) and end >= 2**31
    if start == 0 and (huge or end == dim):
        return dim
    if may_be_empty:
        return None
    if isinstance(start, int) and start >= 0 and (huge or end == dim):
        return _shorter(dim, start)
    if start == 0 and isinstance(end, int) and end < 0:
        return _shorter(dim, -end)
    if isinstance(start, int) and start < 0 and huge:
        return -start if isinstance(dim, int) or start == -1 else None
    if start == 0 and end == 1:
        return 1
    return None


def _shorter(dim: Dim, by: int) -> Dim | None:
    """What is left of an axis; None where it may have fewer elements than are taken away."""
    if isinstance(dim, int):
        return max(dim - by, 0)
    left = simplify(dim - by)
    expression = None if isinstance(left, int) else left._expr
    return left if expression is None or expression.is_nonnegative else None
