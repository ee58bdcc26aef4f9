"""ONNX's Attention, RotaryEmbedding and TensorScatter (opset 23 to 25) written out; shapes as in Operators.md."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import describe, source_of

Value = ir.Value


def attention(op: Builder, node: ir.Node) -> list[Value]:
    """Y, the keys and values with those of the past before them, and the scores or weights."""
    given = [shapes.operand(node, i) for i in range(7)]
    q, k, v = (_heads(op, node, given[i], name) for i, name in enumerate(("q", "kv", "kv")))
    keys = k if given[4] is None else op.Concat(given[4], k, axis=2)
    values = v if given[5] is None else op.Concat(given[5], v, axis=2)
    scores = product = op.MatMul(_scaled(op, node, q), op.transpose(_shared(op, keys, q)))
    if cap := shapes.attribute(node, "softcap", 0.0):
        scores = op.Tanh(scores / cap) * cap
    biased = _biased(op, node, scores, given)
    weights = _weights(op, node, biased, free=biased is scores)
    y = op.MatMul(weights, _shared(op, values, q))
    if shapes.rank(node.inputs[0]) == 3:  # type: ignore[arg-type]
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.ints(0, 0, -1))
    made = [y, keys, values, (product, scores, biased, weights)[shapes.attribute(node, "qk_matmul_output_mode", 0)]]
    return made[: len(node.outputs)]


def _heads(op: Builder, node: ir.Node, x: Value | None, kind: str) -> Value:
    """(batch, heads, length, width) of (batch, length, heads * width)."""
    assert x is not None
    if shapes.rank(x) == 4:
        return x
    count = shapes.attribute(node, f"{kind}_num_heads")
    return op.Transpose(op.Reshape(x, op.ints(0, 0, count, -1)), perm=[0, 2, 1, 3])


def _scaled(op: Builder, node: ir.Node, q: Value) -> Value:
    scale = shapes.attribute(node, "scale")
    return over_root_of_width(op, q) if scale is None else q * scale


def over_root_of_width(op: Builder, q: Value) -> Value:
    """Queries over the root of the size of their last axis."""
    width = shapes.known_dims(q)[-1]
    if isinstance(width, int):
        return q * width**-0.5
    return q / op.Sqrt(op.CastLike(op.Squeeze(op.size(q, -1), op.ints(0)), q))


def _shared(op: Builder, x: Value, q: Value) -> Value:
    """Each head of keys or values repeated for the heads of queries that share it."""
    if shapes.known_dims(x)[1] == shapes.known_dims(q)[1]:
        return x
    sizes = [op.size(x, i) for i in range(4)]
    group = op.Div(op.size(q, 1), sizes[1])
    wide = op.Expand(op.Unsqueeze(x, op.ints(2)), op.Concat(sizes[0], sizes[1], group, *sizes[2:], axis=0))
    return op.Reshape(wide, op.Concat(sizes[0], op.size(q, 1), *sizes[2:], axis=0), allowzero=1)


def _biased(op: Builder, node: ir.Node, scores: Value, given: list[Value | None]) -> Value:
    """The scores with the mask added, and -∞ where a row does not see a column; themselves where it sees all."""
    minus_infinity, zero = op.like(float("-inf"), scores), op.like(0.0, scores)
    mask, past, filled = given[3], given[4], given[6]
    if mask is not None:
        scores = scores + (op.Where(mask, zero, minus_infinity) if mask.dtype == ir.DataType.BOOL else mask)
    for seen in _seen(op, node, scores, past, filled):
        scores = scores + op.Where(seen, zero, minus_infinity)
    return scores


def _seen(op: Builder, node: ir.Node, scores: Value, past: Value | None, filled: Value | None) -> Iterator[Value]:
    """Conditions under which a row sees a column, to be broadcast to the scores.

    A row stands after all of the past; where the keys are a cache that is filled so far, as the last rows of it.
    """
    causal = shapes.attribute(node, "is_causal", 0)
    left, right = (shapes.attribute(node, f"{side}_window_size", -1) for side in ("left", "right"))
    if filled is None and not causal and left < 0 and right < 0:
        return
    zero, one = op.constant(0), op.constant(1)
    rows, columns = (op.Range(zero, op.Squeeze(op.size(scores, a), op.ints(0)), one) for a in (-2, -1))
    rows = op.Unsqueeze(rows, op.ints(1))
    if past is not None:
        rows = rows + op.size(past, 2)
    if filled is not None:
        count = op.Unsqueeze(op.cast(filled, ir.DataType.INT64), op.ints(1, 2, 3))
        rows = rows + (count - op.size(scores, -2))
        yield op.Less(columns, count)
    if causal:
        yield op.LessOrEqual(columns, rows)
    if right >= 0:
        yield op.LessOrEqual(columns, rows + op.constant(right))
    if left >= 0:
        yield op.GreaterOrEqual(columns, rows - op.constant(left))


def _weights(op: Builder, node: ir.Node, scores: Value, free: bool) -> Value:
    """Softmax of the scores; a row that sees nothing gets zeros, which cannot be where all rows are free."""
    dtype = shapes.dtype_of(scores)
    precise = op.cast(scores, ir.DataType(shapes.attribute(node, "softmax_precision", 0) or dtype))
    if free:
        return op.cast(op.Softmax(precise, axis=-1), dtype)
    top = op.Detach(op.ReduceMax(precise, op.ints(-1), keepdims=1))
    exponentials = op.Exp(precise - op.Where(op.IsInf(top), op.like(0.0, top), top))
    total = op.ReduceSum(exponentials, op.ints(-1), keepdims=1)
    nothing = op.Equal(total, op.like(0.0, total))
    return op.cast(exponentials / op.Where(nothing, op.like(1.0, total), total), dtype)


def rotary_embedding(op: Builder, node: ir.Node) -> list[Value]:
    """Pairs of elements of each head turned by the angle of their position.

    Raises:
        ShapeError: the width of the caches is not known.
    """
    x, cos, sin = node.inputs[:3]
    assert x is not None and cos is not None and sin is not None
    positions = shapes.operand(node, 3)
    return [turned(op, node, x, cos, sin, positions)]


def turned(op: Builder, node: ir.Node, x: Value, cos: Value, sin: Value, positions: Value | None) -> Value:
    """The heads of x turned by caches that have a row for each position, or, where there are none, for each of x."""
    if positions is not None:
        cos, sin = op.Gather(cos, positions, axis=0), op.Gather(sin, positions, axis=0)
    half, width = _half(node, x, cos), shapes.attribute(node, "rotary_embedding_dim", 0)
    cos, sin = op.Unsqueeze(cos, op.ints(1)), op.Unsqueeze(sin, op.ints(1))
    part = heads = x if shapes.rank(x) == 4 else _rotary_heads(op, node, x, half)
    rest = None
    if width:
        part = op.Slice(heads, op.ints(0), op.ints(2 * half), op.ints(3))
        rest = op.Slice(heads, op.ints(2 * half), op.ints(2**62), op.ints(3))
    if shapes.attribute(node, "interleaved", 0):
        pairs = op.Split(op.Reshape(part, op.ints(0, 0, 0, half, 2)), op.ints(1, 1), axis=-1, outputs=2)
        a, b = (op.Squeeze(p, op.ints(-1)) for p in pairs)
        parts = [op.Unsqueeze(p, op.ints(-1)) for p in (cos * a - sin * b, sin * a + cos * b)]
        y = op.Reshape(op.Concat(*parts, axis=-1), op.ints(0, 0, 0, 2 * half))
    else:
        a, b = op.Split(part, op.ints(half, half), axis=-1, outputs=2)
        y = op.Concat(cos * a - sin * b, sin * a + cos * b, axis=-1)
    y = y if rest is None else op.Concat(y, rest, axis=-1)
    if shapes.rank(x) == 3:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.ints(0, 0, -1))
    return y


def _rotary_heads(op: Builder, node: ir.Node, x: Value, half: int) -> Value:
    """(batch, heads, length, width); where their number is not stated, all of a head is turned."""
    count = shapes.attribute(node, "num_heads", 0)
    sizes = op.ints(0, 0, count, -1) if count else op.ints(0, 0, -1, 2 * half)
    return op.Transpose(op.Reshape(x, sizes), perm=[0, 2, 1, 3])


def _half(node: ir.Node, x: Value, cos: Value) -> int:
    width = shapes.attribute(node, "rotary_embedding_dim", 0)
    for size in (width // 2 if width else None, shapes.known_dims(cos)[-1]):
        if isinstance(size, int):
            return size
    last = shapes.known_dims(x)[-1]
    if shapes.rank(x) == 4 and isinstance(last, int):
        return last // 2
    raise ShapeError("the width of RotaryEmbedding's caches is not known", node=describe(node), source=source_of(node))


def tensor_scatter(op: Builder, node: ir.Node) -> list[Value]:
    """The cache with the update written over it from each sample's place on."""
    cache, update, starts = (shapes.operand(node, i) for i in range(3))
    assert cache is not None and update is not None
    rank, zero, one = shapes.rank(cache), op.constant(0), op.constant(1)
    axis = shapes.attribute(node, "axis", -2) % rank
    places = op.Range(zero, op.Squeeze(op.size(update, axis), op.ints(0)), one)
    places = op.Unsqueeze(places, op.ints(*(i for i in range(rank) if i != axis)))
    if starts is not None:
        places = op.Add(places, op.Unsqueeze(op.cast(starts, ir.DataType.INT64), op.ints(*range(1, rank))))
    if shapes.attribute(node, "mode", "linear") == "circular":
        places = op.Mod(places, op.Squeeze(op.size(cache, axis), op.ints(0)))
    return [op.ScatterElements(cache, op.Expand(places, op.shape(update)), update, axis=axis)]
