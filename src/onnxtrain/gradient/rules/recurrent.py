"""Gradients of RNN, LSTM and GRU: one node that carries the differentiated expansion as its body."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.build import differentiate_body
from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.recurrent import expand, hidden_size, setting

Value = ir.Value


@gradient("RNN", "LSTM", "GRU")
def recurrent(ctx: Context, dy: Value | None, *inputs: Value | None, **attributes: Any) -> Any:
    """The operator run again, then walked backwards, in one node that a backend may lower to one kernel."""
    node = ctx.node
    hidden = attributes["hidden_size"] = hidden_size(node)
    given = [v for v in inputs if v is not None]
    formals = [ir.Value(name=f"given_{i}", type=v.type, shape=v.shape) for i, v in enumerate(given)]
    graph = ir.Graph(formals, [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name=node.op_type)
    op = Builder(graph)
    op.metadata = ctx.op.metadata
    chosen = setting(node.op_type, attributes)
    present = iter(formals)
    made = expand(op, chosen, [None if v is None else next(present) for v in inputs], hidden)
    graph.outputs.extend(made[: len(node.outputs)])
    wanted = [asked for v, asked in zip(inputs, ctx.wanted, strict=True) if v is not None]
    body, _ = differentiate_body(graph, wanted, [g is not None for g in ctx.dys])
    result = ctx.op.node(
        f"{node.op_type}Grad",
        [*inputs, *[None] * (8 - len(inputs)), *ctx.dys],
        {**attributes, "body": body, "wanted": [int(asked) for asked in (*ctx.wanted, *[False] * (8 - len(inputs)))]},
        domain=DOMAIN,
        outputs=sum(wanted),
        like=[v for v, asked in zip(given, wanted, strict=True) if asked],
    )
    found = iter(result.outputs)
    return tuple(next(found) if asked else None for asked in ctx.wanted)
