"""Models of their own from parts of a model, which hand each other their values by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.ir.graphs import Segment, copy_notes


def part(model: ir.Model, nodes: Sequence[ir.Node], inputs: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """A model of its own from some of the nodes of another: nodes and values are copied, names kept.

    Args:
        model: the other one.
        nodes: in order.
        inputs: names of what it is given.
        outputs: names of what it gives.
    """
    old = {v.name: v for n in nodes for v in (*n.inputs, *n.outputs) if v is not None}
    old |= {v.name: v for v in (*model.graph.inputs, *model.graph.outputs)}
    copies = _Copies()
    given = [copies[old[name]] for name in inputs]
    made = [_copy_node(n, copies) for n in nodes]
    constants = [c for v, c in copies.items() if v.is_initializer() and not v.is_graph_input()]
    return _model(model, made, given, [copies[old[name]] for name in outputs], constants)


class Half(NamedTuple):
    """What one of two parts of a model is to be: its nodes in order, names of what it is given and of what it gives."""

    nodes: Sequence[ir.Node]
    inputs: Sequence[str]
    outputs: Sequence[str]


def split(model: ir.Model, first: Half, second: Half) -> tuple[ir.Model, ir.Model]:
    """A model as two, the second of which runs after the first: its nodes move to them, and it is used up.

    Args:
        model: the model.
        first: the part that keeps its values.
        second: the part that has copies, of the same names, of the values that it is handed.
    """
    graph = model.graph
    made = (v for n in graph for v in n.outputs)
    named = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values(), *made)}
    fixed = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for held in (graph.inputs, graph.outputs, graph.initializers):
        held.clear()
    graph.remove([*graph])
    own, copies = {v for n in second.nodes for v in n.outputs}, _Copies()
    for node in second.nodes:
        for index, value in enumerate(node.inputs):
            if value is not None and value not in own:
                node.replace_input_with(index, copies[value])
    given = [copies[named[name]] for name in second.inputs]
    gives = [v if (v := named[name]) in own else copies[v] for name in second.outputs]
    after = _model(model, second.nodes, given, gives, [c for v, c in copies.items() if v in fixed])
    gives = [named[name] for name in first.outputs]
    constants = dict.fromkeys(v for v in (*(v for n in first.nodes for v in n.inputs), *gives) if v in fixed)
    return _model(model, first.nodes, [named[name] for name in first.inputs], gives, [*constants]), after


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


class _Copies(dict[ir.Value, ir.Value]):
    """Values and their copies, which are made when they are asked for."""

    def __missing__(self, value: ir.Value) -> ir.Value:
        made = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        copy_notes(value, made)
        self[value] = made
        return made


def _copy_node(node: ir.Node, copies: _Copies) -> ir.Node:
    made = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else copies[v] for v in node.inputs],
        attributes=list(node.attributes.values()),
        outputs=[copies[v] for v in node.outputs],
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    copy_notes(node, made)
    return made


def _model(
    like: ir.Model,
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    initializers: Sequence[ir.Value],
) -> ir.Model:
    imports, name = dict(like.graph.opset_imports), like.graph.name
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, opset_imports=imports, name=name)
    return ir.Model(graph, ir_version=like.ir_version)
