"""Cut a training graph into a forward and a backward model, joined by the saved values."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxtrain.ir.graphs import ForwardGraph, Plan, TrainingGraph, is_backward
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan.segments import segments_of


def make_plan(graph: TrainingGraph | ForwardGraph) -> Plan:
    """Partition a training graph; a forward graph becomes a plan for inference.

    Saved values are found: forward values (graph inputs included) that a backward node or a gradient output reads.
    """
    if isinstance(graph, ForwardGraph):
        return Plan(graph.model, None, graph.signature)
    nodes = list(graph.model.graph)
    forward = [n for n in nodes if not is_backward(n)]
    backward = [n for n in nodes if is_backward(n)]
    forward, backward = _move_sizes_to_forward(forward, backward)
    forward, backward = _move_to_backward(forward, backward, graph)
    seeds = set(graph.output_gradients.values())
    saved = _saved(backward, graph, seeds)
    second = _part(graph.model, backward, [*saved, *graph.output_gradients.values()], graph.gradients.values())
    return Plan(
        _part(graph.model, forward, _forward_inputs(graph), _forward_outputs(graph, saved)),
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
    extra = [v for v in graph.model.graph.outputs if v.name in set(graph.gradients.values())]
    found: dict[str, None] = {}
    for value in [*read, *extra]:
        constant = value.is_initializer() and not value.is_graph_input()
        if value not in made and not constant and value.name not in seeds:
            found[str(value.name)] = None
    return list(found)


def _forward_inputs(graph: TrainingGraph) -> list[str]:
    return list(graph.signature.inputs)


def _forward_outputs(graph: TrainingGraph, saved: Iterable[str]) -> list[str]:
    inputs = set(graph.signature.inputs)
    visible = [*graph.signature.outputs, *graph.signature.buffer_updates.values()]
    return list(dict.fromkeys([*visible, *(name for name in saved if name not in inputs)]))


def _part(model: ir.Model, nodes: list[ir.Node], inputs: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """A model of its own from some of the nodes: values are copied, names kept."""
    old = {v.name: v for n in nodes for v in (*n.inputs, *n.outputs) if v is not None}
    old |= {v.name: v for v in (*model.graph.inputs, *model.graph.outputs)}
    copies: dict[ir.Value, ir.Value] = {}

    def copy(value: ir.Value | None) -> ir.Value | None:
        if value is not None and value not in copies:
            made = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            made.meta.update(value.meta)
            copies[value] = made
        return None if value is None else copies[value]

    given = [copy(old[name]) for name in inputs]
    made = [_copy_node(n, copy) for n in nodes]
    constants = [c for v, c in copies.items() if v.is_initializer() and not v.is_graph_input()]
    graph = ir.Graph(
        given,  # type: ignore[arg-type]
        [copy(old[name]) for name in outputs],  # type: ignore[misc]
        nodes=made,
        initializers=constants,
        opset_imports=dict(model.graph.opset_imports),
        name=model.graph.name,
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _copy_node(node: ir.Node, copy: object) -> ir.Node:
    made = ir.Node(
        node.domain,
        node.op_type,
        [copy(v) for v in node.inputs],  # type: ignore[operator]
        attributes=list(node.attributes.values()),
        outputs=[copy(v) for v in node.outputs],  # type: ignore[operator]
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    made.meta.update(node.meta)
    return made
