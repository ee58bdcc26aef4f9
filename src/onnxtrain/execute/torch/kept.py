"""What operators keep for their gradients beside values: autograd's record of a call, and its kernel's workspace."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.execute.torch.registry import lowering_of

_OPERANDS = 8  # of a recurrent operator, missing ones included


def kept_between(forward: Iterable[ir.Node], backward: Iterable[ir.Node]) -> list[tuple[ir.Node, ir.Node]]:
    """The nodes that keep something, each with its gradient.

    Args:
        forward: nodes of the forward pass.
        backward: nodes of the backward pass, where saved values have the names that they have in the forward pass.
    """
    makers = {_key(node, node.op_type): node for node in forward if _can_keep(node)}
    found: dict[ir.Node, ir.Node] = {}
    for node in backward:
        maker = makers.get(_key(node, node.op_type.removesuffix("Grad"))) if _can_keep(node) else None
        if maker is not None:
            found.setdefault(maker, node)
    return list(found.items())


def _can_keep(node: ir.Node) -> bool:
    lowering = lowering_of(node)
    return lowering is not None and "kept" in lowering.wants


def _key(node: ir.Node, kind: str) -> tuple[str | None, ...]:
    operands = [None if v is None else v.name for v in node.inputs[:_OPERANDS]]
    return (kind, *operands, *[None] * (_OPERANDS - len(operands)))
