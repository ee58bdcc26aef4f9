"""Operators that onnxruntime's optimizers put into models, written out; shapes as in its ContribOperators.md."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir import linear_attention as standard
from onnxtrain.ir import shapes
from onnxtrain.ir.attention import turned
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.gates import swish
from onnxtrain.ir.graphs import describe, source_of, unavailable
from onnxtrain.ir.shapes import attribute, operand

Value = ir.Value
DOMAIN = "com.microsoft"


def gelu(op: Builder, node: ir.Node) -> list[Value]:
    """Gelu of the sum of all inputs; FastGelu's is the one by tanh."""
    form = "tanh" if node.op_type == "FastGelu" else "none"
    return [op.Gelu(_sum(op, *node.inputs), approximate=form)]


def quick_gelu(op: Builder, node: ir.Node) -> list[Value]:
    """``x * sigmoid(alpha * x)``."""
    x = _given(node, 0)
    return [x * op.Sigmoid(x * attribute(node, "alpha", 1.702))]


def swiglu(op: Builder, node: ir.Node) -> list[Value]:
    """Swish of the gate times the other operand, both bounded before; one input holds both, the gate first."""
    gate, value = _given(node, 0), operand(node, 1)
    if value is None:
        gate, value = op.Split(gate, axis=-1, num_outputs=2, outputs=2)
    dtype, limit = shapes.dtype_of(gate), attribute(node, "limit", 0.0)
    gate, value = op.cast(gate, ir.DataType.FLOAT), op.cast(value, ir.DataType.FLOAT)
    if limit > 0:
        gate, value = op.Clip(gate, None, limit), op.Clip(value, -limit, limit)
    value = value + attribute(node, "activation_beta", 0.0)
    return [op.cast(swish(op, gate, attribute(node, "activation_alpha", 1.0)) * value, dtype)]


def bias_split_gelu(op: Builder, node: ir.Node) -> list[Value]:
    """The first half of the last axis times Gelu of the second."""
    a, b = op.Split(_sum(op, *node.inputs), axis=-1, num_outputs=2, outputs=2)
    return [a * op.Gelu(b)]


def bias_add(op: Builder, node: ir.Node) -> list[Value]:
    """The sum of all inputs."""
    return [_sum(op, *node.inputs)]


def bias_dropout(op: Builder, node: ir.Node) -> list[Value]:
    """Dropout of ``data + bias``, and the residual added to it."""
    data, bias, residual, ratio, training = (operand(node, i) for i in range(5))
    y, mask = op.Dropout(_sum(op, data, bias), ratio, training, seed=attribute(node, "seed"), outputs=2)
    return [_sum(op, y, residual), mask]


def bias_softmax(op: Builder, node: ir.Node) -> list[Value]:
    """Softmax of ``data + bias`` over all axes from ``axis`` on."""
    scores = _sum(op, *node.inputs)
    axis, rank = attribute(node, "axis", 1), shapes.rank(scores)
    if axis in (-1, rank - 1):
        return [op.Softmax(scores, axis=-1)]
    return [op.Reshape(op.Softmax(op.Flatten(scores, axis=axis), axis=-1), op.shape(scores))]


def matmul(op: Builder, node: ir.Node) -> list[Value]:
    """``alpha * A @ B``, either transposed before, in its batch axes too; then an activation."""
    a, b = (_transposed(op, node, i, side) for i, side in enumerate("AB"))
    product, alpha = op.MatMul(a, b), attribute(node, "alpha", 1.0)
    return [_activated(op, node, product if alpha == 1.0 else product * alpha)]


def _transposed(op: Builder, node: ir.Node, index: int, side: str) -> Value:
    x = _given(node, index)
    plain, batch = (bool(attribute(node, f"{name}{side}", 0)) for name in ("trans", "transBatch"))
    if not plain and not batch:
        return x
    order = list(range(shapes.rank(x)))
    if batch:
        order = [*order[1:-1], 0, order[-1]]
    if plain and len(order) > 1:
        order[-2:] = order[:-3:-1]
    return op.Transpose(x, perm=order)


def gemm(op: Builder, node: ir.Node) -> list[Value]:
    """Gemm and an activation."""
    settings = {n: a.value for n, a in node.attributes.items() if not n.startswith("activation")}
    return [_activated(op, node, op.Gemm(*node.inputs, **settings))]


def conv(op: Builder, node: ir.Node) -> list[Value]:
    """Conv, the fourth input added to it, and an activation."""
    settings = {n: a.value for n, a in node.attributes.items() if not n.startswith("activation")}
    y = op.Conv(*node.inputs[:3], **settings)
    return [_activated(op, node, _sum(op, y, operand(node, 3)))]


_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Relu", "Tanh", "Sigmoid", "Softplus", "Softsign", "HardSwish"), ()),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}


def _activated(op: Builder, node: ir.Node, x: Value) -> Value:
    """The activation that a fused node names, its parameters in a list or in attributes of their own."""
    name = attribute(node, "activation", "")
    if not name:
        return x
    given = [attribute(node, f"activation_{n}") for n in ("alpha", "beta")]
    given = [*(attribute(node, "activation_params") or given)]
    if name == "Clip":
        return op.Clip(x, *given)
    if name not in _ACTIVATIONS:
        raise _unavailable(node, f"the activation {name}")
    return getattr(op, name)(x, **dict(zip(_ACTIVATIONS[name], given, strict=False)))


def skip_layer_normalization(op: Builder, node: ir.Node) -> list[Value]:
    """The sum of input, skip and bias, normalized; mean, 1 / deviation and the sum itself come too."""
    x, skip, gamma, beta, bias = (operand(node, i) for i in range(5))
    total = _sum(op, x, skip, bias)
    y, mean, deviation = op.LayerNormalization(
        total, gamma, beta, axis=-1, epsilon=attribute(node, "epsilon", 1e-12), outputs=3
    )
    return [y, mean, deviation, total]


def skip_simplified_layer_normalization(op: Builder, node: ir.Node) -> list[Value]:
    """The sum of input, skip and bias over its root mean square."""
    x, skip, gamma, bias = (operand(node, i) for i in range(4))
    assert gamma is not None
    total = _sum(op, x, skip, bias)
    y, inverse = _over_root_mean_square(op, total, gamma, -1, attribute(node, "epsilon", 1e-12))
    return [y, inverse, inverse, total]  # there is no mean: nothing reads that output


def simplified_layer_normalization(op: Builder, node: ir.Node) -> list[Value]:
    """x over its root mean square, times scale; 1 / root comes too."""
    axis, epsilon = attribute(node, "axis", -1), attribute(node, "epsilon", 1e-5)
    return [*_over_root_mean_square(op, _given(node, 0), _given(node, 1), axis, epsilon)]


def _over_root_mean_square(op: Builder, x: Value, scale: Value, axis: int, epsilon: float) -> tuple[Value, Value]:
    dtype = shapes.dtype_of(x)
    precise = x if dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType.FLOAT)
    axes = (-1,) if axis == -1 else range(axis % shapes.rank(x), shapes.rank(x))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(precise * precise, op.ints(*axes), keepdims=1) + epsilon))
    return op.cast(precise * inverse, shapes.dtype_of(scale)) * scale, inverse


def embed_layer_normalization(op: Builder, node: ir.Node) -> list[Value]:
    """The sum of word, position and segment embeddings, normalized; the mask's lengths and the sum come too."""
    ids, segments, words, places, kinds, gamma, beta, mask, positions = (operand(node, i) for i in range(9))
    assert ids is not None
    if positions is None:
        length = op.Squeeze(op.size(ids, 1), op.ints(0))
        positions = op.Unsqueeze(op.Range(op.constant(0), length, op.constant(1)), op.ints(0))
    total = _sum(op, op.Gather(words, ids, axis=0), op.Gather(places, positions, axis=0))
    if segments is not None:
        total = total + op.Gather(kinds, segments, axis=0)
    y = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=attribute(node, "epsilon", 1e-12))
    if mask is not None:
        lengths = op.ReduceSum(mask, op.ints(1), keepdims=0)
    else:
        lengths = op.Expand(op.constant(0, ir.DataType.INT32), op.size(ids, 0))
    return [y, lengths, total]


def attention(op: Builder, node: ir.Node) -> list[Value]:
    """Projections of one input, and attention between them."""
    x, weights, bias, mask, past, added = (operand(node, i) for i in range(6))
    if attribute(node, "do_rotary", 0) or attribute(node, "past_present_share_buffer", 0):
        raise _unavailable(node, "rotary embeddings or a shared buffer")
    count, sizes = attribute(node, "num_heads"), attribute(node, "qkv_hidden_sizes")
    parts = {"num_outputs": 3} if sizes is None else {}
    projected = _sum(op, op.MatMul(x, weights), bias)
    split = op.Split(projected, None if sizes is None else op.ints(*sizes), axis=-1, outputs=3, **parts)
    q, k, v = (_heads(op, part, count) for part in split)
    if past is not None:
        before = [op.Squeeze(p, op.ints(0)) for p in op.Split(past, axis=0, num_outputs=2, outputs=2)]
        k, v = (op.Concat(old, new, axis=2) for old, new in zip(before, (k, v), strict=True))
    made = [_attend(op, node, q, k, v, mask, added)]
    if len(node.outputs) > 1:
        made.append(op.Concat(op.Unsqueeze(k, op.ints(0)), op.Unsqueeze(v, op.ints(0)), axis=0))
    return made


def multi_head_attention(op: Builder, node: ir.Node) -> list[Value]:
    """Attention between queries, keys and values, to each of which a part of the bias is added."""
    query, key, value, bias, mask, added, past_key, past_value = (operand(node, i) for i in range(8))
    if query is None or key is None or value is None or shapes.rank(query) != 3 or len(node.inputs) > 8:
        raise _unavailable(node, "packed queries, keys and values, or a cache")
    count, given = attribute(node, "num_heads"), [query, key, value]
    if bias is not None:
        widths = [shapes.known_dims(v)[-1] for v in (query, query, value)]
        if shapes.rank(key) != 3 or not all(isinstance(w, int) for w in widths):
            raise _unavailable(node, "a bias of keys that are given by heads")
        biases = op.Split(bias, op.ints(*widths), axis=0, outputs=3)  # type: ignore[arg-type]
        given = [a + b for a, b in zip(given, biases, strict=True)]
    q, k, v = (v if shapes.rank(v) == 4 else _heads(op, v, count) for v in given)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    return [_attend(op, node, q, k, v, mask, added), k, v][: len(node.outputs)]


def rotary_embedding(op: Builder, node: ir.Node) -> list[Value]:
    """As ONNX's; the positions come second, or, where they are one number, are those that follow it."""
    x, positions, cos, sin = (_given(node, i) for i in range(4))
    if attribute(node, "is_packed_batching", 0) or attribute(node, "scale", 1.0) != 1.0:
        raise _unavailable(node, "packed batches or a scale")
    if shapes.known_dims(positions) == (1,):
        axis = 1 if shapes.rank(x) == 3 else 2
        positions = op.Add(op.Unsqueeze(_range(op, x, axis), op.ints(0)), positions)
    return [turned(op, node, x, cos, sin, positions)]


def linear_attention(op: Builder, node: ir.Node) -> list[Value]:
    """As ONNX's, without a window of states."""
    _refuse(node, state_window=0)
    return standard.linear_attention(op, node)


def causal_convolution(op: Builder, node: ir.Node) -> list[Value]:
    """As ONNX's, with dilation too; along one axis, channels first, states of the usual length."""
    _refuse(node, ndim=1, channels_last=0, state_channels_last=-1, state_window=0, state_length=0)
    _refuse(node, state_update_capacity=0, input_channels=0, input_channel_offset=0)
    return standard.causal_convolution(op, node)


def _refuse(node: ir.Node, **defaults: int) -> None:
    """An error where an attribute is not what it is by default."""
    for name, default in defaults.items():
        if (found := attribute(node, name, default)) != default:
            raise _unavailable(node, f"{name}={found}")


def _heads(op: Builder, x: Value, count: int) -> Value:
    """(batch, heads, length, width) of (batch, length, heads * width)."""
    return op.Transpose(op.Reshape(x, op.ints(0, 0, count, -1)), perm=[0, 2, 1, 3])


def _attend(op: Builder, node: ir.Node, q: Value, k: Value, v: Value, mask: Value | None, added: Value | None) -> Value:
    """(batch, length, heads * width) of queries, keys and values by heads."""
    scale = attribute(node, "scale", 0.0)
    if not scale:
        width = op.CastLike(op.Squeeze(op.size(q, 3), op.ints(0)), q)
        scale = op.Reciprocal(op.Sqrt(width))
    scores = op.MatMul(q * scale, op.transpose(k))
    if added is not None:
        scores = scores + added
    if mask is not None:
        nothing = attribute(node, "mask_filter_value", -10000.0)
        hidden = op.like(nothing, scores)
        scores = scores + op.Where(_kept(op, node, mask, scores), op.like(0.0, scores), hidden)
    if attribute(node, "unidirectional", 0):
        lowest = op.like(float(shapes.dtype_of(scores).min), scores)  # type: ignore[arg-type]
        rows, columns = _range(op, scores, -2), _range(op, scores, -1)
        past = op.size(scores, -1) - op.size(scores, -2)
        seen = op.LessOrEqual(op.Unsqueeze(columns, op.ints(0)), op.Unsqueeze(rows + past, op.ints(1)))
        scores = op.Where(seen, scores, lowest)
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.ints(0, 0, -1))


def _kept(op: Builder, node: ir.Node, mask: Value, scores: Value) -> Value:
    """Which keys are seen, to be broadcast to the scores.

    The mask has a number for each key (batch, keys), for each query and key, or the number of keys (batch).
    """
    rank, zero = shapes.rank(mask), op.like(0, mask)
    if rank == 1 and shapes.known_dims(mask)[0] == shapes.known_dims(scores)[0]:
        return op.Less(op.cast(_range(op, scores, -1), shapes.dtype_of(mask)), op.Unsqueeze(mask, op.ints(1, 2, 3)))
    if rank not in (2, 3):
        raise _unavailable(node, "a mask of that shape")
    return op.Unsqueeze(op.Greater(mask, zero), op.ints(*((1, 2) if rank == 2 else (1,))))


def _range(op: Builder, x: Value, axis: int) -> Value:
    """The places along an axis."""
    return op.Range(op.constant(0), op.Squeeze(op.size(x, axis), op.ints(0)), op.constant(1))


def same(op: Builder, node: ir.Node) -> list[Value]:
    """The operator of ONNX that has the same name and form."""
    settings = {n: a.value for n, a in node.attributes.items()}
    return list(op.node(node.op_type, node.inputs, settings, outputs=len(node.outputs)).outputs)


def _given(node: ir.Node, index: int) -> Value:
    found = operand(node, index)
    if found is None:
        raise GraphError(f"its input {index} is missing", node=describe(node), source=source_of(node))
    return found


def _sum(op: Builder, *terms: Value | None) -> Value:
    """The sum of the terms that are there."""
    total, *rest = (t for t in terms if t is not None)
    for term in rest:
        total = op.Add(total, term)
    return total


def _unavailable(node: ir.Node, what: str) -> GraphError:
    return unavailable(node, f"{node.op_type} with {what}", "give the model as it was before onnxruntime optimized it")


CONTRIB: dict[str, Callable[[Builder, ir.Node], list[Value]]] = {
    **dict.fromkeys(("Gelu", "BiasGelu", "FastGelu"), gelu),
    "QuickGelu": quick_gelu,
    "SwiGLU": swiglu,
    "BiasSplitGelu": bias_split_gelu,
    "BiasAdd": bias_add,
    "BiasDropout": bias_dropout,
    "BiasSoftmax": bias_softmax,
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation"), matmul),
    "FusedGemm": gemm,
    "FusedConv": conv,
    **dict.fromkeys(("LayerNormalization", "Trilu", "GatherND"), same),
    "SimplifiedLayerNormalization": simplified_layer_normalization,
    "SkipLayerNormalization": skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": skip_simplified_layer_normalization,
    "EmbedLayerNormalization": embed_layer_normalization,
    "Attention": attention,
    "MultiHeadAttention": multi_head_attention,
    "RotaryEmbedding": rotary_embedding,
    "LinearAttention": linear_attention,
    "CausalConvWithState": causal_convolution,
}
