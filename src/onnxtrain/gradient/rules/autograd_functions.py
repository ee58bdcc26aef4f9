"""Gradient of a ``torch.autograd.Function``: its own backward pass."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir.graphs import describe, source_of
from onnxtrain.ir.python_calls import PYTHON_OP, call_of

Value = ir.Value


@gradient(PYTHON_OP, domain=DOMAIN)
def python_op(ctx: Context, dy: Value | None, sizes: Value | None, *tensors: Value, **attributes: Any) -> Any:
    """One PythonOpGrad node: the autograd context and the outputs' gradients in, a gradient for each tensor out.

    The forward node learns which gradients are wanted: its class may ask, and keep less.
    """
    wanted = ctx.wanted[1:]
    ctx.node.attributes["needs_input_grad"] = ir.AttrInt64s("needs_input_grad", [int(w) for w in wanted])
    reuse = call_of(ctx.node).backward_reuse
    attributes = {"func_name": attributes["func_name"], "needs_input_grad": [int(w) for w in wanted]}
    if reuse is not None:
        attributes["tensor_reuse_map"] = [-1 if output == -1 else output + 1 for output in reuse]
    operands = [ctx.output(0), *ctx.dys[1:]]
    made = ctx.op.node(f"{PYTHON_OP}Grad", operands, attributes, domain=DOMAIN, outputs=len(tensors), like=tensors)
    return (None, *(dx if w else None for dx, w in zip(made.outputs, wanted, strict=True)))


@gradient(f"{PYTHON_OP}Grad", domain=DOMAIN)
def python_op_grad(ctx: Context, dy: Value | None, *operands: Value | None, func_name: str, **attributes: Any) -> Any:
    """None: what a class's backward pass read of its forward pass is inside of its context."""
    raise GradientError(
        f"double backward: the backward pass of {func_name} cannot be differentiated again",
        node=describe(ctx.node),
        source=source_of(ctx.node),
        cure="run the module whose gradient is differentiated (a gradient penalty) in eager PyTorch: model.module",
    )
