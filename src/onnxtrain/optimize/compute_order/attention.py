"""Attention for some of its queries: keys and values stay whole."""

from __future__ import annotations

import json
import math
from typing import Any

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.optimize.compute_order.rules import Move, dims_at, operand_part, rule_of, same
from onnxtrain.optimize.compute_order.selections import Part, Place
from onnxtrain.optimize.compute_order.taking import Taker

ROWS = 2  # axis of the queries in (batch, heads, rows, width)


@rule_of("ScaledDotProductAttention", "MaskedScaledDotProductAttention", domain=DOMAIN)
def _attention(node: ir.Node, part: Part) -> Move | None:
    return _move(node, part)


@rule_of("CausalScaledDotProductAttention", domain=DOMAIN)
def _causal(node: ir.Node, part: Part) -> Move | None:
    """A row that is taken out sees the columns that it saw: the mask is written down."""
    found = _move(node, part)
    if found is None or part.place.axis != ROWS:
        return found
    if not same(dims_at(node, 0)[ROWS], dims_at(node, 1)[ROWS]):
        return None

    def masked(op: Taker, node: ir.Node) -> None:
        query = node.inputs[0]
        assert query is not None
        mask = op.Where(_seen(op, node, part), op.like(0.0, query), op.like(-math.inf, query))
        _add_mask(node, mask)
        node.op_type = "MaskedScaledDotProductAttention"

    return Move(found.parts, masked)


@rule_of("ATen", domain=DOMAIN)
def _aten(node: ir.Node, part: Part) -> Move | None:
    """Torch's scaled_dot_product_attention; its dropout draws for the rows that are left."""
    call = call_of(node)
    found = None if call is None or len(dims_at(node)) != ROWS + 2 else _move(node, part)
    if call is None or found is None or not call.get("is_causal") or part.place.axis != ROWS:
        return found
    if not same(dims_at(node, 0)[ROWS], dims_at(node, 1)[ROWS]):
        return None
    keywords = {k: call[k] for k in ("dropout_p", "scale", "enable_gqa") if call.get(k) is not None}

    def masked(op: Taker, node: ir.Node) -> None:
        _add_mask(node, _seen(op, node, part))
        arguments = json.dumps([{"input": i} for i in range(4)])
        node.attributes["arguments"] = ir.AttrString("arguments", arguments)
        node.attributes["keywords"] = ir.AttrString("keywords", json.dumps(keywords))

    return Move(found.parts, masked)


def _move(node: ir.Node, part: Part) -> Move | None:
    """Rows are the queries'; batch and heads everybody's."""
    result, axis = shapes.known_dims(node.outputs[0]), part.place.axis
    if ROWS + 1 in part.axes or part.place.merged or (part.batch is not None and part.batch.axis != 0):
        return None
    for index in range(3 if axis != ROWS else 1):
        if any(not same(dims_at(node, index)[a], result[a]) for a in part.axes):
            return None
    parts = dict.fromkeys(range(3 if axis != ROWS else 1), part)
    mask = operand_part(part, dims_at(node, 3), result) if len(node.inputs) > 3 else None
    return Move(parts if mask is None else parts | {3: mask})


def _seen(op: Taker, node: ir.Node, part: Part) -> ir.Value:
    """Whether a column is not after the row, for the rows of a part: broadcasts to (batch, heads, rows, columns)."""
    query, key = node.inputs[:2]
    assert query is not None and key is not None
    columns = op.Range(op.constant(0), op.Squeeze(op.size(key, ROWS), op.ints(0)), op.constant(1))
    rows = op.take(columns, Part(part.selection, Place(0, (part.selection.size,)), None, 2 if part.batch else 0))
    wide = op.Unsqueeze(rows, op.ints(1, 3) if part.batch is not None else op.ints(1))
    return op.LessOrEqual(columns, wide)


def _add_mask(node: ir.Node, mask: ir.Value) -> None:
    node.resize_inputs(4)
    node.replace_input_with(3, mask)


def call_of(node: ir.Node) -> dict[str, Any] | None:
    """The arguments of a call of torch's attention by name; None for another call, or one in another form."""
    if shapes.attribute(node, "operator") != "aten::scaled_dot_product_attention":
        return None
    given = json.loads(node.attributes["arguments"].as_string())
    call = dict(zip(_PARAMETERS, given, strict=False)) | json.loads(node.attributes["keywords"].as_string())
    tensors = [call.get(name) for name in _PARAMETERS[: len(node.inputs)]]
    if len(node.inputs) not in (3, 4) or tensors != [{"input": i} for i in range(len(node.inputs))]:
        return None
    numbers = [call.get(n) for n in ("dropout_p", "is_causal", "scale", "enable_gqa")]
    return None if any(isinstance(n, dict | list) for n in numbers) else call


_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
