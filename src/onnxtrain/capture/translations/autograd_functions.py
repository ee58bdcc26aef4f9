"""Operators of ours that a trace records: a call of a ``torch.autograd.Function``, one ``PythonOp`` node, of
``torch.autograd.grad``, and what stands for another layer's tensor.
"""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture import (  # noqa: F401  (substitutes, and an operator)
    function_transforms,
    inner_gradients,
    stand_in_tensors,
)
from onnxtrain.capture.aten import hold
from onnxtrain.capture.nodes import record_node
from onnxtrain.capture.python_op import recorded
from onnxtrain.capture.translations import translation, vector
from onnxtrain.ir.functions import FURTHER, GRADIENTS
from onnxtrain.ir.python_calls import HANDLE, PYTHON_OP, Place, PythonCall


@translation(torch.ops.onnxtrain.python_op.default)
def python_op(tensors: list[ir.Value], sizes: list[Any], call: str) -> Any:
    """Sizes, then tensors in; the autograd context, then the tensors that the call returns out."""
    found = recorded(call)
    attributes = _attributes(found.call) | {HANDLE: call}
    made = record_node(PYTHON_OP, [vector(sizes) if sizes else None, *tensors], attributes, outputs=1 + len(found.made))
    context, *results = made if isinstance(made, tuple) else (made,)
    context.type, context.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
    hold(context)
    return results


@translation(torch.ops.onnxtrain.gradients.default)
def gradients(outputs: list[ir.Value], seeds: list[ir.Value], inputs: list[ir.Value], allow_unused: bool) -> Any:
    """A node that stands for a backward pass until the forward pass is whole."""
    attributes = {"count": len(outputs), "allow_unused": int(allow_unused)}
    made = record_node(GRADIENTS, [*outputs, *seeds, *inputs], attributes, outputs=len(inputs))
    return list(made) if isinstance(made, tuple) else [made]


@translation(torch.ops.onnxtrain.layers_further.default)
def layers_further(x: ir.Value, prefix: str, by: int) -> Any:
    """A node that stands for a layer's value until all layers are in the graph."""
    return record_node(FURTHER, [x], {"prefix": prefix, "by": by})


def _attributes(call: PythonCall) -> dict[str, Any]:
    """What a reader of the graph wants to know, by the names of onnxruntime-training; what runs is the call itself."""
    arguments = call.structure.unflatten([_printed(leaf) for leaf in call.leaves])
    convention = "".join("d" if isinstance(a, dict) and "tensor" in a else "c" for a in arguments)
    attributes: dict[str, Any] = {"func_name": call.name, "input_convention": convention}
    attributes["arguments"] = json.dumps(arguments)
    if call.forward_reuse is not None:
        attributes["tensor_reuse_map"] = [-1, *call.forward_reuse]
    return attributes


def _printed(leaf: Any) -> Any:
    """An argument as JSON: numbers and tuples of them as they are, another object by its type."""
    if isinstance(leaf, Place):
        return {leaf.kind: [leaf.index, leaf.length] if leaf.length else leaf.index}
    if isinstance(leaf, bool | int | float | str | None):
        return leaf
    if isinstance(leaf, tuple | list) and all(isinstance(x, bool | int | float | str | None) for x in leaf):
        return list(leaf)
    return {"object": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}
