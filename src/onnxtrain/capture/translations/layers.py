"""Linear layers, embeddings, splits and detach."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import like, number, translation, vector, whole

aten = torch.ops.aten


@translation(aten.linear.default)
def linear(x, weight, bias=None):
    """One node, with or without a bias; one of several rows is added to the product."""
    if bias is None:
        return record_node("LinearWithoutBias", [x, weight])
    if len(bias.shape) > 1:
        return op.Add(record_node("LinearWithoutBias", [x, weight]), bias)
    return record_node("Linear", [x, weight, bias])


@translation(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(x, y):
    """One MatMul."""
    return op.MatMul(x, y)


@translation(aten.addmm.default)
def addmm(x, first, second, beta=1, alpha=1):
    """One Gemm."""
    if not x.dtype.is_floating_point():
        return NotImplemented
    return op.Gemm(first, second, x, alpha=alpha, beta=beta)


@translation(aten.baddbmm.default)
def baddbmm(x, first, second, beta=1, alpha=1):
    """The same of each two matrices of a batch."""
    return _added(x, op.MatMul(first, second), beta, alpha)


@translation(aten.addbmm.default)
def addbmm(x, first, second, beta=1, alpha=1):
    """The same of their sum over the batch."""
    return _added(x, op.ReduceSum(op.MatMul(first, second), vector([0]), keepdims=0), beta, alpha)


@translation(aten.addmv.default)
def addmv(x, matrix, column, beta=1, alpha=1):
    """The same of a matrix and a vector."""
    return _added(x, op.MatMul(matrix, column), beta, alpha)


def _added(x: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """beta · x + alpha · product; where beta is 0 what x holds is ignored, even where it is no number."""
    if not x.dtype.is_floating_point():
        return NotImplemented
    product = product if _is(alpha, 1) else op.Mul(product, like(alpha, x))
    if _is(beta, 0):
        return op.Where(op.Constant(value=ir.tensor(False)), x, product)
    return op.Add(x if _is(beta, 1) else op.Mul(x, like(beta, x)), product)


def _is(factor: Any, value: int) -> bool:
    return isinstance(factor, int | float) and factor == value


@translation(aten.layer_norm.default)
def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """One LayerNormalization."""
    if weight is None:
        weight = op.Expand(like(1, x), op.Shape(x, start=-len(shape)))
    return op.LayerNormalization(x, weight, bias, axis=-len(shape), epsilon=eps)[0]


@translation(aten.dropout.default)
def dropout(x, p, train):
    """One Dropout; of a number as of a vector of one."""
    if len(x.shape):
        return op.Dropout(x, number(p), train)[0]
    return op.Squeeze(op.Dropout(op.Reshape(x, [-1]), number(p), train)[0])


@translation(aten.feature_dropout.default)
def feature_dropout(x, p, train):
    """Whole channels at once: one Dropout of a one for each."""
    rank = len(x.shape)
    if not train or rank < 2:
        return op.Identity(x) if rank >= 2 else NotImplemented
    channels = op.Concat(op.Shape(x, start=0, end=2), vector([1] * (rank - 2)), axis=0)
    return op.Mul(x, op.Dropout(op.Expand(like(1, x), channels), number(p), train)[0])


@translation(aten.gelu.default)
def gelu(x, approximate="none"):
    """One Gelu."""
    return op.Gelu(x, approximate=approximate)


@translation(aten.silu.default)
def silu(x):
    """One Silu node."""
    return record_node("Silu", [x])


@translation(aten.embedding.default)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """One Embedding node, which knows the row that gets no gradient."""
    return record_node("Embedding", [weight, indices], {"padding_idx": -1 if padding_idx is None else padding_idx})


@whole(aten.embedding.default)
def is_scaled_by_counts(node: torch.fx.Node) -> bool:
    """The node knows no gradients divided by how often a row is read."""
    return bool(node.kwargs.get("scale_grad_by_freq", node.args[3] if len(node.args) > 3 else False))


@translation(aten.split.Tensor)
def split(x, size, dim=0):
    """One Split node, of nothing into one part; as a sequence where the number of parts is not known."""
    total = x.shape[dim]
    if not isinstance(total, int) or not isinstance(size, int):
        return NotImplemented
    if total == 0:
        return _split(x, [0], dim)
    sizes = [size] * (total // size) + ([total % size] if total % size else [])
    return _split(x, sizes, dim)


@translation(aten.chunk.default)
def chunk(x, chunks, dim=0):
    """One Split node; all parts of nothing are empty. As a sequence where the number of parts is not known."""
    total = x.shape[dim]
    if not isinstance(total, int):
        return NotImplemented
    return split(x, (total + chunks - 1) // chunks, dim) if total else _split(x, [0] * chunks, dim)


@translation(aten.split_with_sizes.default)
def split_with_sizes(x, sizes, dim=0):
    """One Split node; as a sequence where the number of parts is not known."""
    if not isinstance(sizes, list | tuple):
        return NotImplemented
    return _split(x, list(sizes), dim)


@translation(aten.unbind.int)
def unbind(x, dim=0):
    """One slice for each index; as a sequence where their number is not known."""
    total = x.shape[dim]
    if not isinstance(total, int):
        return NotImplemented
    return tuple(op.Gather(x, op.Constant(value_int=i), axis=dim) for i in range(total))


def _split(x: Any, sizes: list[Any], dim: int) -> tuple[Any, ...]:
    if len(sizes) == 1:
        return (op.Identity(x),)
    return tuple(record_node("Split", [x, vector(sizes)], {"axis": dim}, outputs=len(sizes), domain=""))


@translation(torch.ops.prims.broadcast_in_dim.default)
def broadcast_in_dim(a, shape, broadcast_dimensions):
    """Axes inserted, then expanded: in the shape that torch.onnx gives Reshape, a size of 0 would copy another."""
    inserted = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    wide = op.Unsqueeze(a, op.Constant(value_ints=inserted)) if inserted else a
    return op.Expand(wide, vector(shape))


@translation(aten.flatten.using_ints)
def flatten(x, start_dim=0, end_dim=-1):
    """One Reshape, whose sizes are products: torch.onnx infers one, which it cannot where another is 0."""
    rank = len(x.shape)
    if rank == 0:
        return op.Reshape(x, op.Constant(value_ints=[1]))
    first, last = start_dim % rank, end_dim % rank
    if first == last:
        return op.Identity(x)
    merged = functools.reduce(op.Mul, (_size(x, axis) for axis in range(first, last + 1)))
    before, after = ([_size(x, axis) for axis in axes] for axes in (range(first), range(last + 1, rank)))
    return op.Reshape(x, op.Concat(*before, merged, *after, axis=0), allowzero=1)


def _size(x: Any, axis: int) -> Any:
    size = x.shape[axis]
    return op.Constant(value_ints=[size]) if isinstance(size, int) else op.Shape(x, start=axis, end=axis + 1)


@translation(aten.group_norm.default)
def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """As torch.onnx has it, with sizes that are computed: it infers one, which it cannot where another is 0."""
    rank = len(x.shape)
    groups = op.Constant(value_ints=[num_groups])
    elements = functools.reduce(op.Mul, (_size(x, axis) for axis in range(1, rank)))
    grouped = op.Reshape(x, op.Concat(_size(x, 0), groups, op.Div(elements, groups), axis=0), allowzero=1)
    scale, shift = (op.Expand(like(number, x), groups) for number in (1.0, 0.0))
    made = op.InstanceNormalization(grouped, scale, shift, epsilon=eps)
    made = op.Reshape(made, op.Shape(x), allowzero=1)
    wide = op.Constant(value_ints=list(range(1, rank - 1)))
    made = made if weight is None else op.Mul(made, op.Unsqueeze(weight, wide) if rank > 2 else weight)
    return made if bias is None else op.Add(made, op.Unsqueeze(bias, wide) if rank > 2 else bias)


@translation(aten.detach.default)
def detach(x):
    """Detach: the identity, and a stop for gradients."""
    return record_node("Detach", [x])


@whole(aten.native_layer_norm.default)
def has_statistics(node: torch.fx.Node) -> bool:
    """Torch gives no gradient to the mean and the deviation, LayerNormalization does; layer_norm is another call."""
    return True


@whole(aten.atleast_1d.Sequence, aten.atleast_2d.Sequence, aten.atleast_3d.Sequence)
def is_of_several(node: torch.fx.Node) -> bool:
    """torch.onnx makes a SequenceMap of them, whose tensors have no type (hstack, vstack, dstack)."""
    return True


@whole(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def has_bags(node: torch.fx.Node) -> bool:
    """torch.onnx makes a loop of them over a sequence of the wrong type."""
    return True
