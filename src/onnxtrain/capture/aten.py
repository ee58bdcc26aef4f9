"""Operators kept as ``ATen`` nodes, which torch itself runs and differentiates; how a call becomes such a node."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import record_node
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.traits import PROBES

ATEN = "ATen"
# whose results have no gradient in eager PyTorch: of a factory, which its function hides from autograd, and of counts
_WITHOUT_GRADIENT = frozenset(("aten::randint_like", "aten::histc"))


def can_be_node(node: torch.fx.Node) -> bool:
    """Whether a call can be one node: an operator of torch, not a primitive (those have no gradient), of tensors."""
    target, made = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("prim", "prims"):
        return False
    results = made if isinstance(made, list | tuple) else [made]
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    return bool(tensors) and all(r is None or isinstance(r, torch.Tensor) for r in results)


def recorder_of(node: torch.fx.Node) -> Callable[..., Any]:
    """A translation of this very call: it records the call as one ATen node."""
    target: Any = node.target

    def record(*args: Any, **kwargs: Any) -> Any:
        inputs: list[ir.Value | None] = []
        arguments = json.dumps([_encode(a, v, inputs) for a, v in zip(node.args, args, strict=True)])
        keywords = json.dumps({k: _encode(a, kwargs[k], inputs) for k, a in node.kwargs.items()})
        results = node.meta["val"]
        count = len(results) if isinstance(results, list | tuple) else 1
        attributes = {"operator": str(target.name()), "overload": target._overloadname}
        attributes |= {"arguments": arguments, "keywords": keywords, "results": count}
        if torch.Tag.nondeterministic_seeded in target.tags:
            attributes["seeded"] = 1
        if target._schema.name in _WITHOUT_GRADIENT:
            inputs = [record_node("Detach", [x]) for x in inputs]
        made = record_node(ATEN, inputs, attributes, outputs=count)
        values = made if isinstance(made, tuple) else (made,)
        if target.name() in PROBES:
            hold(values[0])
        return values if isinstance(results, list | tuple) else values[0]

    return record


def hold(value: ir.Value) -> None:
    """Give a value a reader outside the graph: torch.onnx removes nodes that nothing reads, those with effects too."""
    ir.Node(DOMAIN, "Holder", [value], num_outputs=0)


def release(graph: ir.Graph) -> None:
    """Take away the readers that are not in the graph, which kept nodes alive through torch.onnx."""
    for value in (v for node in graph if node.domain == DOMAIN for v in node.outputs):
        for reader, index in tuple(value.uses()):
            if reader.graph is None:
                reader.replace_input_with(index, None)


def _encode(argument: Any, value: Any, inputs: list[ir.Value | None]) -> Any:
    """An argument as JSON: a tensor is ``{"input": its position}``, a computed number ``{"number": position}``.

    Args:
        argument: as the traced call has it.
        value: the same as translations take it: calls replaced by values of the graph.
        inputs: the node's inputs so far; those met are added.
    """
    if isinstance(value, ir.Value):
        inputs.append(value)
        is_tensor = isinstance(argument.meta.get("val"), torch.Tensor)
        return {"input" if is_tensor else "number": len(inputs) - 1}
    if isinstance(argument, torch.fx.Node):
        return value
    if isinstance(argument, list | tuple):
        return [_encode(a, v, inputs) for a, v in zip(argument, value, strict=True)]
    if isinstance(argument, bool | int | float | str | None):
        return argument
    if isinstance(argument, complex):
        return {"complex": [argument.real, argument.imag]}
    return {"text": str(argument)}
