"""Linear models and scalers of ``ai.onnx.ml``, whose weights are attributes: as operators of ONNX with weights.

``lift`` turns the attributes into initializers, inputs of the node from then on; they are trained and named like any
other. Then the node is written out; formulas are those of onnxruntime's kernels. A classifier's scores before its
``post_transform`` are a value of the name ``{scores}.raw``, for losses that take no probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import free_name, unavailable
from onnxtrain.ir.shapes import attribute

Value = ir.Value
DOMAIN = "ai.onnx.ml"
_LEAST = 1e-7  # what onnxruntime's SOFTMAX_ZERO takes for 0
_ARRAYS = {
    "LinearClassifier": ("coefficients", "intercepts"),
    "LinearRegressor": ("coefficients", "intercepts"),
    "Scaler": ("scale", "offset"),
}


def lift(graph: ir.Graph) -> None:
    """Make initializers of what the attributes of linear models and scalers hold, in place."""
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type in _ARRAYS:
            made = [_initializer(graph, node, name) for name in _ARRAYS[node.op_type]]
            node.resize_inputs(1 + len(made))
            for index, value in enumerate(made, 1):
                node.replace_input_with(index, value)


def _initializer(graph: ir.Graph, node: ir.Node, name: str) -> Value | None:
    """One of the arrays of a node, a row for each class or target where there are several."""
    if name not in node.attributes:
        return None
    content = np.asarray(node.attributes.pop(name).value, np.float32)
    if name == "coefficients":
        rows = _rows(node)
        if not content.size or content.size % rows:
            raise _unavailable(node, f"{content.size} coefficients in {rows} rows")
        content = content.reshape(rows, -1)
    taken = {v.name for n in graph for v in n.outputs} | {v.name for v in graph.inputs} | {*graph.initializers}
    unique = free_name(f"{node.name or node.outputs[-1].name}.{name}", taken)
    value = ir.val(unique, const_value=ir.tensor(content, name=unique))
    graph.register_initializer(value)
    return value


def _rows(node: ir.Node) -> int:
    """How many scores a linear model has: it says so by its intercepts, or else by its classes or targets."""
    if (intercepts := attribute(node, "intercepts")) is not None and len(intercepts):
        return len(intercepts)
    return len(_labels(node)) if node.op_type == "LinearClassifier" else max(attribute(node, "targets", 1), 1)


def _labels(node: ir.Node) -> list[int] | list[str]:
    found = attribute(node, "classlabels_ints") or attribute(node, "classlabels_strings")
    if not found:
        raise _unavailable(node, "no class labels")
    return list(found)


def scaler(op: Builder, node: ir.Node) -> list[Value]:
    """``(x - offset) · scale``."""
    x, scale, offset = _x(op, node), *node.inputs[1:]
    x = x if offset is None else x - offset
    return [x if scale is None else x * scale]


def normalizer(op: Builder, node: ir.Node) -> list[Value]:
    """Rows over their largest element, or their L1 or L2 norm; where that is 0 they stay."""
    x, kind = _x(op, node), attribute(node, "norm", "MAX")
    kinds = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}
    if kind not in kinds:
        raise _unavailable(node, f"norm={kind}")
    norm = kinds[kind](x, op.ints(-1), keepdims=1)
    return [x / op.Where(op.Equal(norm, op.like(0.0, norm)), op.like(1.0, norm), norm)]


def regressor(op: Builder, node: ir.Node) -> list[Value]:
    """``x · coefficientsᵀ + intercepts``, transformed."""
    return [_transformed(op, node, _scores(op, node))]


def classifier(op: Builder, node: ir.Node) -> list[Value]:
    """The label with the highest score, and the scores, transformed."""
    labels, raw = _labels(node), _scores(op, node)
    rows = shapes.known_dims(raw)[-1]
    if rows == 1 and len(labels) == 2:
        return _binary(op, node, raw, labels)
    if rows != len(labels):
        raise _unavailable(node, f"{rows} scores of {len(labels)} classes")
    best = op.ArgMax(raw, axis=-1, keepdims=0)
    return [op.Gather(_constant(op, node, labels), best, axis=0), _transformed(op, node, raw)]


def _binary(op: Builder, node: ir.Node, raw: Value, labels: list[int] | list[str]) -> list[Value]:
    """One score that decides between two classes; that of the first class is its complement."""
    if attribute(node, "post_transform", "NONE") not in ("NONE", "LOGISTIC"):
        raise _unavailable(node, "one score and another post_transform than LOGISTIC")
    y = _transformed(op, node, raw)
    best = op.cast(op.Greater(op.Squeeze(raw, op.ints(-1)), op.like(0.0, raw)), ir.DataType.INT64)
    both = op.Concat(op.like(1.0, y) - y, y, axis=-1)
    return [op.Gather(_constant(op, node, labels), best, axis=0), both]


def _constant(op: Builder, node: ir.Node, labels: list[int] | list[str]) -> Value:
    """The labels of all classes."""
    if isinstance(labels[0], int):
        return op.ints(*labels)  # type: ignore[arg-type]
    texts = [text.encode() if isinstance(text, str) else text for text in labels]
    value = ir.val(f"{node.outputs[-1].name}.labels", const_value=ir.StringTensor(texts, shape=ir.Shape([len(texts)])))  # type: ignore[arg-type]
    op.graph.register_initializer(value)
    return value


def _scores(op: Builder, node: ir.Node) -> Value:
    """The scores before any transformation."""
    _, coefficients, intercepts = node.inputs
    if coefficients is None:
        raise _unavailable(node, "no coefficients")
    y = op.MatMul(_x(op, node), op.Transpose(coefficients, perm=[1, 0]))
    y = y if intercepts is None else y + intercepts
    y.name = f"{node.outputs[-1].name}.raw"
    return y


def _transformed(op: Builder, node: ir.Node, x: Value) -> Value:
    kind = attribute(node, "post_transform", "NONE")
    if kind == "NONE":
        return op.Identity(x)
    if kind == "LOGISTIC":
        return op.Sigmoid(x)
    if kind == "SOFTMAX":
        return op.Softmax(x, axis=-1)
    if kind != "SOFTMAX_ZERO":
        raise _unavailable(node, f"post_transform={kind}")
    some = op.Greater(op.Abs(x), op.like(_LEAST, x))
    high = op.Detach(op.ReduceMax(x, op.ints(-1), keepdims=1))
    parts = op.Where(some, op.Exp(x - high), op.like(0.0, x))
    total = op.ReduceSum(parts, op.ints(-1), keepdims=1)
    return parts / op.Where(op.Equal(total, op.like(0.0, total)), op.like(1.0, total), total)


def _x(op: Builder, node: ir.Node) -> Value:
    """The operand, which is of any numeric type, in single precision."""
    x = node.inputs[0]
    if x is None:
        raise _unavailable(node, "no operand")
    return op.cast(x, ir.DataType.FLOAT)


def _unavailable(node: ir.Node, what: str) -> GraphError:
    return unavailable(node, f"{node.op_type} with {what}", "export it with the operators of ONNX")


LINEAR_MODELS: dict[str, Callable[[Builder, ir.Node], list[Value]]] = {
    "LinearClassifier": classifier,
    "LinearRegressor": regressor,
    "Normalizer": normalizer,
    "Scaler": scaler,
}
