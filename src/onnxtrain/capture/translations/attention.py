"""Attention: one node where a fused kernel exists in both directions, else its formula."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.capture import learned_masks
from onnxtrain.capture.nodes import op, record_node
from onnxtrain.capture.translations import number, translation, whole

aten = torch.ops.aten


@translation(aten.scaled_dot_product_attention.default)
def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """One node where a fused kernel exists in both directions; Softmax(Q K^T) V otherwise (dropout, learned masks)."""
    if len(query.shape) == 3:
        batch = [_as_a_batch(x) for x in (query, key, value)]
        made = attention(*batch, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return op.Squeeze(made, op.Constant(value_ints=[0]))
    if attn_mask is not None and len(attn_mask.shape) < 2:
        attn_mask = _as_a_matrix(attn_mask)
    size = query.shape[-1]
    fixed = isinstance(scale, int | float) or (scale is None and isinstance(size, int))
    factor = (float(scale) if scale is not None else float(size) ** -0.5) if fixed else _scale_of(query, scale)
    if enable_gqa:
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
    learned = learned_masks.is_learned(attn_mask)
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2]  # else batches or heads are broadcast
    if dropout_p == 0.0 and not learned and fixed and alike:
        if attn_mask is None:
            op_type = "CausalScaledDotProductAttention" if is_causal else "ScaledDotProductAttention"
            return record_node(op_type, [query, key, value], {"scale": factor})
        if not is_causal:
            mask = _additive(attn_mask, query) if attn_mask.dtype == ir.DataType.BOOL else attn_mask
            return record_node("MaskedScaledDotProductAttention", [query, key, value, mask], {"scale": factor})
    seen, mask = (_opened if learned else _with_no_blind_query)(attn_mask, query)
    made = _plain_attention(query, key, value, mask, float(dropout_p), bool(is_causal), factor)
    return made if seen is None else op.Where(seen, made, op.CastLike(number(0.0), query))


def _as_a_batch(x: Any) -> Any:
    batch = op.Unsqueeze(x, op.Constant(value_ints=[0]))
    batch.type, batch.shape = x.type, ir.Shape([1, *x.shape])
    return batch


def _as_a_matrix(mask: Any) -> Any:
    """A mask that is the same for all queries, or for all keys too, with axes of size 1."""
    missing = 2 - len(mask.shape)
    matrix = op.Unsqueeze(mask, op.Constant(value_ints=[*range(missing)]))
    matrix.type, matrix.shape = mask.type, ir.Shape([1] * missing + [*mask.shape])
    return matrix


@whole(aten.scaled_dot_product_attention.default)
def has_other_axes(node: torch.fx.Node) -> bool:
    """The translation is for (batch, heads, rows, width), and for (heads, rows, width), of as many of each.

    A 1 is broadcast; of a size that is not known and may be 0 beside another torch makes zeros, as MatMul does not.
    """
    shapes = [x.meta["val"].shape for x in node.args[:3]]
    if {*map(len, shapes)} not in ({3}, {4}):
        return True
    query, *others = [shape[:-2] for shape in shapes]
    pairs = [pair for other in others for pair in zip(other, query, strict=True)]
    return any(isinstance(size, torch.SymInt) and not statically_known_true(size == asked) for size, asked in pairs)


@whole(aten._safe_softmax.default)
def is_masked(node: torch.fx.Node) -> bool:
    """A row that is masked altogether is 0, and so is its gradient, which the formula makes NaN."""
    return True


def _additive(mask: Any, model: Any) -> Any:
    minus_infinity = op.CastLike(number(float("-inf")), model)
    return op.Where(mask, op.CastLike(number(0.0), model), minus_infinity)


def _opened(mask: Any, query: Any) -> tuple[Any, Any]:
    """What ``_with_no_blind_query`` says, of a learned mask; of the queries nothing where no key can be hidden.

    Keys are hidden by what is not learned alone: so fewer elements are looked at, and rows that hide keys are still
    found among the terms of the mask.
    """
    shown = learned_masks.shown_keys(mask)
    if shown is None:
        return None, mask
    seen = _any_key(shown)
    return seen, learned_masks.opened(mask, seen)


def _any_key(shown: Any) -> Any:
    return op.Cast(op.ReduceMax(op.Cast(shown, to=ir.DataType.INT32), [-1], keepdims=1), to=ir.DataType.BOOL)


def _with_no_blind_query(mask: Any, query: Any) -> tuple[Any, Any]:
    """Whether each query sees a key, and the mask to add, in which those that see none see all.

    Softmax of minus infinity alone is not a number; in torch such a query's result is 0, and so is its gradient.
    """
    if mask is None:
        return None, None
    if mask.dtype == ir.DataType.BOOL:
        seen = _any_key(mask)
        return seen, _additive(op.Or(mask, op.Not(seen)), query)
    seen = op.Greater(op.ReduceMax(mask, [-1], keepdims=1), op.CastLike(number(float("-inf")), mask))
    return seen, op.Where(seen, mask, op.CastLike(number(0.0), mask))


def _repeat_heads(query: Any, value: Any) -> Any:
    """Each key and value head repeated for the query heads that share it (grouped-query attention)."""
    repeats = query.shape[1] // value.shape[1]
    if repeats == 1:
        return value
    shape = op.Shape(value)
    first, rest = op.Slice(shape, [0], [2]), op.Slice(shape, [2], [4])
    wide = op.Expand(op.Unsqueeze(value, [2]), op.Concat(first, [repeats], rest, axis=0))
    return op.Reshape(wide, op.Concat(op.Slice(shape, [0], [1]), [query.shape[1]], rest, axis=0))


def _scale_of(query: Any, scale: Any) -> Any:
    """The scale as a value of the graph: given as one, or the inverse root of a width that is not known."""
    if scale is not None:
        return op.CastLike(scale, query)
    return op.Reciprocal(op.Sqrt(op.CastLike(op.Squeeze(op.Shape(query, start=-1)), query)))


def _plain_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | ir.Value
) -> Any:
    """As eager computes it: query and key scaled by sqrt(scale) each, mask added, Softmax, Dropout."""
    root = op.Sqrt(scale) if isinstance(scale, ir.Value) else op.CastLike(number(scale**0.5), query)
    scores = op.MatMul(op.Mul(query, root), op.Transpose(op.Mul(key, root), perm=[0, 1, 3, 2]))
    if causal:
        size = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
        seen = op.Trilu(op.ConstantOfShape(size, value=ir.tensor([True])), upper=0)
        scores = op.Add(scores, _additive(seen, query))
    if mask is not None:
        scores = op.Add(scores, mask)
    weights = op.Softmax(scores, axis=-1)
    if dropout > 0.0:
        training = op.Constant(value=ir.tensor(True))
        weights = record_node("Dropout", [weights, number(dropout), training], domain="")
    return op.MatMul(weights, value)
