"""Matrix products, reductions, transposition and normalization."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.ir.einsum import parse
from onnxtrain.ir.graphs import DOMAIN, describe, source_of
from onnxtrain.ir.shape_rules.sizes import dims_from
from onnxtrain.ir.shapes import (
    Data,
    Dim,
    Dims,
    Facts,
    attribute,
    broadcast,
    constant_of,
    data_of,
    dims_of,
    dtype_of,
    fresh_dims,
    known_dims,
    operand,
    product,
    shape_rule,
)


@shape_rule("MatMul")
def matmul(node: ir.Node) -> Sequence[Facts]:
    """As numpy.matmul: batch axes broadcast."""
    a, b = node.inputs
    assert a is not None and b is not None
    left, right = dims_of(a), dims_of(b)
    if left is None or right is None:
        return [Facts(dtype_of(a), None)]
    _check_inner(node, left[-1], right[-2:][0])
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    return [Facts(dtype_of(a), broadcast(left[:-2], right[:-2], node=node) + rows + columns)]


def _check_inner(node: ir.Node, a: Dim, b: Dim) -> None:
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise ShapeError(f"inner dimensions {a} and {b} differ", node=describe(node), source=source_of(node))


@shape_rule("Gemm")
def gemm(node: ir.Node) -> Sequence[Facts]:
    """Rows of A by columns of B, after their transposition."""
    a, b = known_dims(node.inputs[0]), known_dims(node.inputs[1])  # type: ignore[arg-type]
    rows = a[1] if attribute(node, "transA", 0) else a[0]
    columns = b[0] if attribute(node, "transB", 0) else b[1]
    return [Facts(dtype_of(node.inputs[0]), (rows, columns))]  # type: ignore[arg-type]


@shape_rule("Einsum")
def einsum(node: ir.Node) -> Sequence[Facts]:
    """The dimension of each letter of the result; an operand may have 1 there."""
    operands = [known_dims(v) for v in node.inputs if v is not None]
    try:
        equation = parse(attribute(node, "equation"), [len(d) for d in operands])
    except ValueError as error:
        raise ShapeError(str(error), node=describe(node), source=source_of(node)) from error
    sizes: dict[str, Dims] = {}
    for letters, dims in zip(equation.operands, operands, strict=True):
        for letter, dim in zip(letters, dims, strict=True):
            sizes[letter] = broadcast(sizes.get(letter, (1,)), (dim,), node=node)
    return [Facts(dtype_of(node.inputs[0]), tuple(sizes[letter][0] for letter in equation.result))]  # type: ignore[arg-type]


@shape_rule("Det")
def det(node: ir.Node) -> Sequence[Facts]:
    """One number for each matrix."""
    x = node.inputs[0]
    assert x is not None
    return [Facts(dtype_of(x), known_dims(x)[:-2])]


@shape_rule("Linear", "LinearWithoutBias", domain=DOMAIN)
def linear(node: ir.Node) -> Sequence[Facts]:
    """The last axis becomes the weight's first."""
    x, weight = node.inputs[:2]
    assert x is not None and weight is not None
    return [Facts(dtype_of(x), (*known_dims(x)[:-1], known_dims(weight)[0]))]


@shape_rule("Embedding", domain=DOMAIN)
def embedding(node: ir.Node) -> Sequence[Facts]:
    """The indices' shape and one more axis, as wide as the table."""
    weight, indices = node.inputs[:2]
    assert weight is not None and indices is not None
    return [Facts(dtype_of(weight), known_dims(indices) + known_dims(weight)[1:])]


@shape_rule("Transpose")
def transpose(node: ir.Node) -> Sequence[Facts]:
    """Dimensions in the order of ``perm`` (default: reversed)."""
    x = node.inputs[0]
    assert x is not None
    dims = dims_of(x)
    if dims is None:
        return [Facts(dtype_of(x), None)]
    order = attribute(node, "perm") or range(len(dims) - 1, -1, -1)
    return [Facts(dtype_of(x), tuple(dims[i] for i in order))]


@shape_rule(
    *(f"Reduce{k}" for k in ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"])
)
def reduce(node: ir.Node) -> Sequence[Facts]:
    """The axes become 1, or go; none given is all, or none with ``noop_with_empty_axes``."""
    x = node.inputs[0]
    assert x is not None
    dims, keep = dims_of(x), attribute(node, "keepdims", 1)
    if dims is None:
        return [Facts(dtype_of(x), None)]
    content = constant_of(operand(node, 1))
    if operand(node, 1) is not None and content is None:
        return [Facts(dtype_of(x), fresh_dims(node.outputs[0], len(dims)) if keep else None)]
    axes = tuple(attribute(node, "axes") or ()) if content is None else tuple(content.reshape(-1).tolist())
    if not axes and attribute(node, "noop_with_empty_axes", 0):
        return [Facts(dtype_of(x), dims)]
    gone = {a % max(1, len(dims)) for a in axes} if axes else set(range(len(dims)))  # torch reduces scalars, too
    return [Facts(dtype_of(x), _reduced(dims, gone, bool(keep)), _product_of(node, x, bool(keep)))]


def _product_of(node: ir.Node, x: ir.Value, keep: bool) -> Data | None:
    """The content of a product of sizes: the number of elements of a part of a shape."""
    data = data_of(x)
    if node.op_type != "ReduceProd" or not isinstance(data, tuple):
        return None
    return (product(data),) if keep else product(data)


def _reduced(dims: Dims, gone: set[int], keep: bool) -> Dims:
    if keep:
        return tuple(1 if i in gone else d for i, d in enumerate(dims))
    return tuple(d for i, d in enumerate(dims) if i not in gone)


@shape_rule("LayerNormalization")
def layer_normalization(node: ir.Node) -> Sequence[Facts]:
    """The operand's shape; mean and inverse deviation have 1 from ``axis`` on, in the type of ``stash_type``."""
    x = node.inputs[0]
    assert x is not None
    dims = known_dims(x)
    axis = attribute(node, "axis", -1) % len(dims)
    kind = ir.DataType(attribute(node, "stash_type", ir.DataType.FLOAT))
    statistics = Facts(kind, dims[:axis] + (1,) * (len(dims) - axis))
    return [Facts(dtype_of(x), dims), statistics, statistics]


@shape_rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def loss(node: ir.Node) -> Sequence[Facts]:
    """A scalar, or the labels' shape without reduction; then the log probabilities."""
    scores, labels = node.inputs[:2]
    assert scores is not None and labels is not None
    reduction = attribute(node, "reduction", "mean")
    dims = dims_of(labels) if reduction == "none" else ()
    return [Facts(dtype_of(scores), dims), Facts(dtype_of(scores), dims_of(scores))]


@shape_rule("LinearCrossEntropy", domain=DOMAIN)
def linear_cross_entropy(node: ir.Node) -> Sequence[Facts]:
    """A scalar and gradients in the shapes of x, weight and bias, float32 at least."""
    x, weight = node.inputs[:2]
    assert x is not None and weight is not None
    dtype = _precise(dtype_of(x))
    return [Facts(dtype, dims) for dims in ((), known_dims(x), known_dims(weight), known_dims(weight)[:1])]


def _precise(dtype: ir.DataType) -> ir.DataType:
    """Float32 for half types."""
    return ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype


@shape_rule("ScaledDotProductAttention", "MaskedScaledDotProductAttention", domain=DOMAIN)
def attention(node: ir.Node) -> Sequence[Facts]:
    """Queries' rows in the values' width; one log-sum-exp for each row, float32 at least."""
    query, _, value = node.inputs[:3]
    assert query is not None and value is not None
    dims = known_dims(query)
    half = dtype_of(query) in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    width = known_dims(value)[-1]
    return [
        Facts(dtype_of(query), (*dims[:-1], width)),
        Facts(ir.DataType.FLOAT if half else dtype_of(query), dims[:-1]),
    ]


@shape_rule("SumToShape", domain=DOMAIN)
def sum_to_shape(node: ir.Node) -> Sequence[Facts]:
    """The shape that the second operand holds."""
    return [Facts(dtype_of(node.inputs[0]), dims_from(node.inputs[1], node.outputs[0]))]  # type: ignore[arg-type]


@shape_rule("GatherGrad", "EmbeddingGrad", domain=DOMAIN)
def grad_of_shape(node: ir.Node) -> Sequence[Facts]:
    """The gradient of a tensor whose shape is the third operand's content."""
    return [Facts(dtype_of(node.inputs[0]), dims_from(node.inputs[2], node.outputs[0]))]  # type: ignore[arg-type]


@shape_rule("SliceGrad", "PadGrad", domain=DOMAIN)
def grad_of_stated_shape(node: ir.Node) -> Sequence[Facts]:
    """The gradient of a tensor whose shape is the second operand's content."""
    return [Facts(dtype_of(node.inputs[0]), dims_from(node.inputs[1], node.outputs[0]))]  # type: ignore[arg-type]
