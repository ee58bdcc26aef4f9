"""Rewrites of users: ONNX in, ONNX out, applied to every training graph after the passes of ``optimize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir.graphs import BACKWARD, TrainingGraph, is_backward
from onnxtrain.ir.shapes import infer_graph
from onnxtrain.ir.verify import verify

Optimizer: TypeAlias = Callable[[onnx.GraphProto], None]
_REGISTERED: list[tuple[Optimizer, frozenset[str]]] = []  # with the kinds of devices; none means all


def register_graph_optimizer(devices: str | list[str] | None = None) -> Callable[[Optimizer], Optimizer]:
    """Decorate a function that rewrites training graphs in place.

    The function is given the ``onnx.GraphProto`` of forward and backward together. Inputs and outputs must stay.

    Args:
        devices: kinds of devices (``"cpu"``, ``"cuda"``) whose graphs it rewrites; None rewrites all.
    """
    chosen = frozenset([devices] if isinstance(devices, str) else devices or ())

    def register(function: Optimizer) -> Optimizer:
        _REGISTERED.append((function, chosen))
        return function

    return register


def unregister_graph_optimizer(function: Optimizer) -> None:
    """Graphs compiled from now on are not rewritten by the function any longer."""
    _REGISTERED[:] = [entry for entry in _REGISTERED if entry[0] is not function]


def registered_for(device: str) -> list[Optimizer]:
    """The functions that are registered for a kind of device, in the order of registration."""
    kind = device.partition(":")[0]
    return [function for function, devices in _REGISTERED if not devices or kind in devices]


def apply_registered(graph: TrainingGraph, device: str) -> None:
    """Rewrite a training graph by all functions registered for the kind of device, in the order of registration.

    Raises:
        GraphError: a function left the graph malformed; the message names the function.
    """
    for function in registered_for(device):
        _apply(function, graph)


def _apply(function: Optimizer, graph: TrainingGraph) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    for node in graph.model.graph:
        if is_backward(node):
            node.metadata_props[BACKWARD] = "1"
    proto = ir.to_proto(graph.model)
    borders = _borders(proto.graph)
    function(proto.graph)
    if _borders(proto.graph) != borders:
        raise GraphError(f"{name} changed the inputs or outputs of the graph", cure="rewrite what is between them")
    graph.model = ir.from_proto(proto)
    infer_graph(graph.model.graph)
    _mark_backward(graph)
    verify(graph.model, after=name)


def _borders(graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    return [v.name for v in graph.input], [v.name for v in graph.output]


def _mark_backward(graph: TrainingGraph) -> None:
    """Nodes are the backward's that were so before, or that read what only the backward pass has."""
    late = {v for v in graph.model.graph.inputs if v.name in set(graph.output_gradients.values())}
    for node in graph.model.graph:
        if node.metadata_props.pop(BACKWARD, "") or any(v in late for v in node.inputs):
            node.meta[BACKWARD] = True
            late.update(node.outputs)
