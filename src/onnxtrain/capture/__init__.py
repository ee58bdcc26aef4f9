"""nn.Module → Graph: capture the forward pass of a module, training semantics included."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture.convert import to_graph
from onnxtrain.capture.export import Autocast, FlatModule, export
from onnxtrain.capture.schema import Schema, flatten, input_names
from onnxtrain.capture.size_guards import SizeGuards, size_guards
from onnxtrain.ir.graphs import ForwardGraph


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured forward pass and how to give its outputs back.

    Args:
        graph: the ONNX graph; its user inputs are the call's tensors in order.
        inputs: schema of the call, ``(args, kwargs)``.
        outputs: schema of the module's output.
        sources: for each tensor of the output, the position among the graph's outputs.
        guards: the branches on input sizes that the module's own code took.
    """

    graph: ForwardGraph
    inputs: Schema
    outputs: Schema
    sources: tuple[int, ...]
    guards: SizeGuards


def capture(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, opset: int = 20) -> Captured:
    """Capture one call of a module as an ONNX graph with all input dimensions dynamic.

    Raises:
        UnsupportedDataError: an input or output has a type that a graph cannot take.
        CaptureError: the module cannot be traced or translated.
    """
    tensors, inputs = flatten((tuple(args), dict(kwargs)))
    device = next((t.device.type for t in [*tensors, *module.parameters(), *module.buffers()]), "cpu")
    flat = FlatModule(module, inputs, Autocast.current(device))
    program = export(flat, tensors)
    guards = size_guards(program)
    buffers = [name for name, _ in module.named_buffers()]
    graph = to_graph(program, input_names(module.forward, args, kwargs), buffers, opset)
    assert flat.result.schema is not None, "the forward ran, or export raised"
    return Captured(graph, inputs, flat.result.schema, flat.result.sources, guards)


__all__ = ["Autocast", "Captured", "Schema", "capture", "flatten"]
