"""Copies of nodes of a forward pass in its backward pass, which compute again what is not saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import BACKWARD, DOMAIN, RECOMPUTED, Plan, TrainingGraph, free_name, is_backward
from onnxtrain.plan.recompute import Choice, draws_mask, made_with

_SUFFIX = "_recompute"  # of the names of what is computed again


def recomputed(training: TrainingGraph, plan: Plan, chosen: Iterable[Choice]) -> TrainingGraph:
    """The graph, with copies of nodes in the backward pass that compute values again right before they are needed.

    Args:
        training: the graph; it is not changed.
        plan: made of it.
        chosen: what is computed again.
    """
    saved, dropped = {*plan.saved}, set[str]()
    for choice in chosen:
        dropped |= {*choice.dropped}
        saved |= {*choice.kept}
    model = ir.Model(training.model.graph.clone(), ir_version=training.model.ir_version)
    again = _Again(model.graph, saved - dropped)
    for node in list(model.graph):
        if is_backward(node):
            for index, value in enumerate(node.inputs):
                if value is not None and value.name in dropped:
                    node.replace_input_with(index, again.value(value, node))
    return dataclasses.replace(training, model=model)


class _Again:
    """Copies of the nodes of a forward pass in its backward pass.

    Args:
        graph: the training graph.
        saved: names of the values that are saved.
    """

    def __init__(self, graph: ir.Graph, saved: Collection[str]) -> None:
        self.graph, self.saved = graph, saved
        self.names = {str(v.name) for n in graph for v in n.outputs}
        self.node_names = {n.name for n in graph}
        self.copies: dict[ir.Value, ir.Value] = {}

    def value(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """A value as the backward pass has it: saved, or computed again before a node."""
        node = value.producer()
        if value in self.copies:
            return self.copies[value]
        if value.name in self.saved or node is None or shapes.data_of(value) is not None:
            return value
        copy = self._copy(node, value, before)
        copy.name = free_name(f"{node.name or node.outputs[0].name}{_SUFFIX}", self.node_names)
        self.node_names.add(copy.name)
        copy.metadata_props.update(node.metadata_props)
        copy.meta.update(node.meta)
        copy.meta[BACKWARD] = copy.meta[RECOMPUTED] = True
        for old, new in zip(made_with(value), copy.outputs, strict=False):
            self._describe(old, new)
        self.graph.insert_before(before, copy)
        return self.copies[value]

    def _copy(self, node: ir.Node, value: ir.Value, before: ir.Node) -> ir.Node:
        """A node that gives a value again."""
        if draws_mask(node):
            x, mask, ratio = node.inputs[0], node.outputs[1], self.value(node.inputs[1], before)  # type: ignore[arg-type]
            if value is mask:
                stated = [ir.AttrInt64("packed", int(node.domain == DOMAIN))]
                return ir.Node(DOMAIN, "DropoutMask", [*self._state(node), ratio], attributes=stated)
            again = [self.value(v, before) for v in (x, mask)]  # type: ignore[arg-type]
            return ir.Node(DOMAIN, "DropoutGrad", [*again, ratio])
        inputs = [None if v is None else self.value(v, before) for v in node.inputs]
        stated = list(node.attributes.values())
        return ir.Node(node.domain, node.op_type, inputs, attributes=stated, num_outputs=len(node.outputs))

    def _state(self, node: ir.Node) -> Sequence[ir.Value]:
        """What the forward pass notes before it draws a mask: a state of the generator, and the order in memory."""
        op = Builder(self.graph, before=node, names=self.names)
        return op.node("RandomState", [node.inputs[0]], domain=DOMAIN, outputs=2).outputs

    def _describe(self, old: ir.Value, new: ir.Value) -> None:
        if old.name:
            new.name = free_name(f"{old.name}{_SUFFIX}", self.names)
            self.names.add(new.name)
        new.type, new.shape = old.type, old.shape
        new.meta.update(old.meta)
        self.copies[old] = new
