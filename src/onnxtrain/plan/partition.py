"""Cut a training graph into a forward and a backward model, joined by the saved values."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.ir.graphs import ForwardGraph, Plan, TrainingGraph, is_backward
from onnxtrain.ir.parts import Half, split
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan.segments import segments_of


def make_plan(graph: TrainingGraph | ForwardGraph) -> Plan:
    """Partition a training graph, of which a copy is made; a forward graph becomes a plan for inference.

    Saved values are found: forward values (graph inputs included) that a backward node or a gradient output reads.
    """
    return Plan(graph.model, None, graph.signature) if isinstance(graph, ForwardGraph) else partition(graph.copy())


def partition(graph: TrainingGraph) -> Plan:
    """``make_plan`` of a training graph that is used up."""
    nodes = list(graph.model.graph)
    forward = [n for n in nodes if not is_backward(n)]
    backward = [n for n in nodes if is_backward(n)]
    forward, backward = _move_sizes_to_forward(forward, backward)
    forward, backward = _move_to_backward(forward, backward, graph)
    seeds = set(graph.output_gradients.values())
    saved = _saved(backward, graph, seeds)
    first, second = split(
        graph.model,
        Half(forward, graph.signature.inputs, _forward_outputs(graph, saved)),
        Half(backward, [*saved, *graph.output_gradients.values()], [*graph.gradients.values()]),
    )
    return Plan(
        first,
        second,
        graph.signature,
        tuple(saved),
        graph.output_gradients,
        graph.gradients,
        segments_of(second, seeds, graph.gradients),
    )


def _move_sizes_to_forward(forward: list[ir.Node], backward: list[ir.Node]) -> tuple[list[ir.Node], list[ir.Node]]:
    """Sizes of forward values are taken where these are made: a few bytes are saved, and no value is held for them."""
    early: dict[ir.Value | None, list[ir.Node]] = {v: [] for n in forward for v in n.outputs}
    rest = []
    for node in backward:
        is_size = node.domain == "" and node.op_type in ("Shape", "Size")
        (early.get(node.inputs[0], rest) if is_size else rest).append(node)
    return [m for n in forward for m in (n, *(size for v in n.outputs for size in early[v]))], rest


def _move_to_backward(
    forward: list[ir.Node], backward: list[ir.Node], graph: TrainingGraph
) -> tuple[list[ir.Node], list[ir.Node]]:
    """Forward nodes that only the backward pass reads run there instead, where nothing is saved for them.

    Not those that draw random numbers: others draw theirs after them.
    """
    kept_outputs = {*graph.signature.outputs, *graph.signature.buffer_updates.values()}
    late: list[ir.Node] = []
    moved: set[ir.Node] = set(backward)
    for node in reversed(forward):
        users = {use.node for v in node.outputs for use in v.uses()}
        visible = any(v.name in kept_outputs for v in node.outputs)
        stays = (Trait.EFFECT | Trait.RANDOM) & traits_of(node)
        if users and not visible and not stays and users <= moved and _free(node, graph):
            late.append(node)
            moved.add(node)
    return [n for n in forward if n not in moved], late[::-1] + backward


def _free(node: ir.Node, graph: TrainingGraph) -> bool:
    """Whether all of the node's inputs are there in the backward pass at no cost: graph inputs and constants."""
    return all(v is None or v.is_graph_input() or v.is_initializer() for v in node.inputs)


def _saved(backward: Iterable[ir.Node], graph: TrainingGraph, seeds: set[str]) -> list[str]:
    made = {v for n in backward for v in n.outputs}
    read = (v for n in backward for v in n.inputs if v is not None)
    gradients = set(graph.gradients.values())
    extra = [v for v in graph.model.graph.outputs if v.name in gradients]
    found: dict[str, None] = {}
    for value in [*read, *extra]:
        constant = value.is_initializer() and not value.is_graph_input()
        if value not in made and not constant and value.name not in seeds:
            found[str(value.name)] = None
    return list(found)


def _forward_outputs(graph: TrainingGraph, saved: Iterable[str]) -> list[str]:
    inputs = set(graph.signature.inputs)
    visible = [*graph.signature.outputs, *graph.signature.buffer_updates.values()]
    return list(dict.fromkeys([*visible, *(name for name in saved if name not in inputs)]))
