"""Gradients of an ATen operator, of any order: torch's own, taken at run time; a probe's is a probe of the gradient."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient

Value = ir.Value


@gradient("ATen", domain=DOMAIN)
def aten(
    ctx: Context,
    dy: Value | None,
    *inputs: Value,
    operator: str,
    overload: str,
    arguments: str,
    keywords: str,
    results: int = 1,
    seeded: int = 0,
) -> Any:
    """One ATenGrad node: the operator's inputs and its outputs' gradients in, one gradient for each input out.

    It runs the operator again; one that draws random numbers starts from the state they were drawn from, which is
    one more output of the ATen node.
    """
    if operator == "onnxtrain::probe" and dy is not None:
        return _probe(ctx, dy, inputs[0], json.loads(arguments)[1])
    state = [ctx.output(results)] if seeded else []
    call = {"operator": operator, "overload": overload, "arguments": arguments, "keywords": keywords}
    call |= {"inputs": len(inputs), "seeded": seeded}
    made = ctx.op.node(
        "ATenGrad", [*inputs, *ctx.dys[:results], *state], call, domain=DOMAIN, outputs=len(inputs), like=inputs
    )
    return tuple(made.outputs)


@gradient("ATenGrad", domain=DOMAIN)
def aten_grad(
    ctx: Context,
    dy: Value | None,
    first: Value,
    *others: Value | None,
    levels: Sequence[int] = (),
    **call: Any,
) -> Any:
    """One more ATenGrad node: this one's operands and its outputs' gradients in; ``levels`` counts the operands."""
    call |= {"levels": [*levels, 1 + len(others)]}
    like = [first, *(first if x is None else x for x in others)]  # what is missing has no gradient that anybody reads
    made = ctx.op.node("ATenGrad", [first, *others, *ctx.dys], call, domain=DOMAIN, outputs=len(like), like=like)
    return tuple(made.outputs)


def _probe(ctx: Context, dy: Value, x: Value, handle: str) -> Any:
    """dx = dy, reported on its way; ATenGrad would run, and so report, the forward pass again."""
    arguments = json.dumps([{"input": 0}, {"input": 1}, handle])
    call = {"operator": "onnxtrain::probe_backward", "overload": "default", "arguments": arguments, "keywords": "{}"}
    made = ctx.op.node("ATen", [dy, ctx.output(1)], call, domain=DOMAIN, like=[x])
    return made.outputs[0]
