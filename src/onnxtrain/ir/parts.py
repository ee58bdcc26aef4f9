"""Models of their own from parts of a model, which hand each other their values by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxtrain.ir.graphs import Segment, copy_notes


def part(model: ir.Model, nodes: list[ir.Node], inputs: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """A model of its own from some of the nodes of another: values are copied, names kept.

    Args:
        model: the other one.
        nodes: in order.
        inputs: names of what it is given.
        outputs: names of what it gives.
    """
    old = {v.name: v for n in nodes for v in (*n.inputs, *n.outputs) if v is not None}
    old |= {v.name: v for v in (*model.graph.inputs, *model.graph.outputs)}
    copies: dict[ir.Value, ir.Value] = {}

    def copy(value: ir.Value | None) -> ir.Value | None:
        if value is not None and value not in copies:
            made = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            copy_notes(value, made)
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


def cut(model: ir.Model, counts: Sequence[int]) -> list[ir.Model]:
    """A model as several that run one after the other: each is given what it reads, and gives what is read later.

    Args:
        model: the model; constants are in each part that reads them.
        counts: how many of its nodes, in order, are in each part.
    """
    results = dict.fromkeys(model.graph.outputs)
    nodes, ends = list(model.graph), [0, *itertools.accumulate(counts)]
    constants = {n: None for n in nodes if n.op_type == "Constant" and not n.domain and n.outputs[0] not in results}
    fixed = {v for v in model.graph.initializers.values() if not v.is_graph_input()}
    fixed |= {n.outputs[0] for n in constants}
    groups = [[n for n in nodes[a:b] if n not in constants] for a, b in itertools.pairwise(ends)]
    read = [{v: None for n in group for v in n.inputs if v is not None} for group in groups]
    found = []
    for index, group in enumerate(groups):
        made = {v: None for n in group for v in n.outputs}
        later = {v for values in read[index + 1 :] for v in values} | {*results}
        own = [n for n in constants if n.outputs[0] in read[index]]
        given = [str(v.name) for v in read[index] if v not in made and v not in fixed]
        gives = [v for v in made if v in later] + [v for v in results if v in fixed and group is groups[-1]]
        found.append(part(model, [*own, *group], given, [str(v.name) for v in gives]))
    return found


def merged(segments: Sequence[Segment], most: int) -> list[list[Segment]]:
    """Segments in order, in groups of about as many nodes each.

    Args:
        segments: the segments.
        most: how many groups there may be.
    """
    total, groups, done = sum(s.nodes for s in segments), [], 0
    for segment in segments:
        if not groups or (len(groups) < most and done * most >= len(groups) * total):
            groups.append([])
        groups[-1].append(segment)
        done += segment.nodes
    return groups


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
    copy_notes(node, made)
    return made
