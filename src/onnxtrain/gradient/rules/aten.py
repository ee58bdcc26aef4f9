"""Gradient of an ATen operator: torch's own, taken at run time."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient

Value = ir.Value


@gradient("ATen", domain=DOMAIN)
def aten(
    ctx: Context, dy: Value | None, *inputs: Value, operator: str, overload: str, arguments: str, keywords: str
) -> Any:
    """One ATenGrad node: the operator's inputs and its outputs' gradients in, one gradient for each input out."""
    made = ctx.op.node(
        "ATenGrad",
        [*inputs, *ctx.dys],
        {
            "operator": operator,
            "overload": overload,
            "arguments": arguments,
            "keywords": keywords,
            "inputs": len(inputs),
        },
        domain=DOMAIN,
        outputs=len(inputs),
        like=inputs,
    )
    return tuple(made.outputs)
