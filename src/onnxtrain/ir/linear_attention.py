"""ONNX's LinearAttention and CausalConvWithState (opset 27) written out; shapes as in Operators.md."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.attention import over_root_of_width
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.gates import swish
from onnxtrain.ir.graphs import DOMAIN, describe, source_of, unavailable
from onnxtrain.ir.shapes import attribute, operand

Value = ir.Value
_RULES = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}


def linear_attention(op: Builder, node: ir.Node) -> list[Value]:
    """What queries read of a state to which each step adds the product of its key and value, and the last state.

    One Scan over the steps, in float32 at least. With H heads of keys, each read by G heads of queries, a step has
    queries (batch, H, G, key), keys (batch, H, 1, key), values (batch, H, 1, value) and the state (batch, H, key,
    value); decay (batch, H, key or 1, 1) and beta (batch, H or 1, 1, 1) are broadcast.

    Raises:
        GraphError: there is no such update rule, or it has not the inputs that it takes.
    """
    names = _names(node)
    query, key, value, past, decay, beta = (operand(node, i) for i in range(6))
    assert query is not None and key is not None and value is not None
    count = attribute(node, "kv_num_heads")
    heads = (count, attribute(node, "q_num_heads") // count, -1)
    q, k, v = _steps(op, query, *heads), _steps(op, key, count, 1, -1), _steps(op, value, count, 1, -1)
    scale = attribute(node, "scale", 0.0)
    slices = [q * scale if scale else over_root_of_width(op, q), k, v]
    if decay is not None:
        slices.append(op.Exp(_steps(op, decay, count, -1, 1)))
    if beta is not None:
        slices.append(_steps(op, beta, -1, 1, 1))
    state = _initial(op, past, count, k, v)
    settings = {"body": _body([state, *slices], names), "states": 1, "num_scan_inputs": len(slices)}
    last, read = op.node("Scan", [state, *slices], settings, domain=DOMAIN, outputs=2).outputs
    read = op.Reshape(op.Transpose(read, perm=[1, 0, 2, 3, 4]), op.ints(0, 0, -1))
    made = [op.cast(read, shapes.dtype_of(query)), op.cast(last, shapes.dtype_of(query if past is None else past))]
    return made[: len(node.outputs)]


def _names(node: ir.Node) -> tuple[str, ...]:
    """The inputs that the update rule takes beside queries, keys and values; all of them are there."""
    rule = attribute(node, "update_rule", "gated_delta")
    given = tuple(n for n, i in (("decay", 4), ("beta", 5)) if operand(node, i) is not None)
    if given != _RULES.get(rule):
        what = f"{node.op_type} with update_rule={rule} and {' and '.join(given) or 'neither decay nor beta'}"
        takes = "; ".join(f"{name} takes {' and '.join(names) or 'neither'}" for name, names in _RULES.items())
        raise unavailable(node, what, f"give the inputs that the rule takes: {takes}")
    return given


def _steps(op: Builder, x: Value, *sizes: int) -> Value:
    """(length, batch, *sizes) of (batch, length, the product of sizes), in float32 at least."""
    return op.Transpose(op.Reshape(_precise(op, x), op.ints(0, 0, *sizes)), perm=[1, 0, 2, 3, 4])


def _precise(op: Builder, x: Value) -> Value:
    return x if x.dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType.FLOAT)


def _initial(op: Builder, past: Value | None, count: int, k: Value, v: Value) -> Value:
    """The state before the first step; its sizes are said in terms of keys and values, so that steps keep them."""
    size = op.Concat(op.size(k, 1), op.ints(count), op.size(k, -1), op.size(v, -1), axis=0)
    if past is None:
        return op.Expand(op.like(0.0, k), size)
    return op.Reshape(_precise(op, past), size, allowzero=1)


def _body(actual: Sequence[Value], names: Sequence[str]) -> ir.Graph:
    """One step: the state, then slices of queries, keys, values and what is named."""
    dims = [shapes.known_dims(v)[1 if i else 0 :] for i, v in enumerate(actual)]
    formals = [
        ir.Value(name=f"step_{i}", type=v.type, shape=ir.Shape(d))
        for i, (v, d) in enumerate(zip(actual, dims, strict=True))
    ]
    graph = ir.Graph(formals, [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name="step")
    op, (state, q, k, v, *rest) = Builder(graph), formals
    named = dict(zip(names, rest, strict=True))
    with op.arithmetic():
        if "decay" in named:
            state = state * named["decay"]
        if "beta" in named:
            v = named["beta"] * (v - op.MatMul(k, state))
        state = state + op.MatMul(op.transpose(k), v)
        graph.outputs.extend([state, op.MatMul(q, state)])
    return graph


def causal_convolution(op: Builder, node: ir.Node) -> list[Value]:
    """Each channel convolved with what comes before and at each place, and the last that the next call needs.

    Raises:
        ShapeError: the number of channels or the size of the kernel is not known.
    """
    x, weight, bias, past = (operand(node, i) for i in range(4))
    assert x is not None and weight is not None
    channels, _, size = shapes.known_dims(weight)
    if not isinstance(channels, int) or not isinstance(size, int):
        what = f"the channels and the size of {node.op_type}'s weight are not known"
        raise ShapeError(what, node=describe(node), source=source_of(node))
    dilation = attribute(node, "dilation", 1)  # onnxruntime's alone
    width = (size - 1) * dilation
    pads = [width if past is None else 0, 0]
    padded = x if past is None else op.Concat(past, x, axis=2)
    y = op.Conv(padded, weight, bias, group=channels, pads=pads, dilations=[dilation])
    if attribute(node, "activation", "none") in ("silu", "swish"):
        y = op.cast(swish(op, _precise(op, y)), shapes.dtype_of(x))
    if len(node.outputs) == 1:
        return [y]
    if past is None:
        zeros = op.Expand(op.like(0.0, x), op.Concat(op.size(x, 0), op.ints(channels, width), axis=0))
        padded = op.Concat(zeros, x, axis=2)
    return [y, op.Slice(padded, op.size(x, 2), op.ints(2**62), op.ints(2))]
