"""Copies of nodes of a forward pass in its backward pass, which compute again what is not saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import (
    BACKWARD,
    DOMAIN,
    RECOMPUTED,
    Plan,
    TrainingGraph,
    copy_notes,
    describe,
    free_name,
    is_backward,
)
from onnxtrain.plan.lifetimes import owners
from onnxtrain.plan.partition import make_plan
from onnxtrain.plan.recompute import Choice, draws_mask, gives_the_same, made_with

_SUFFIX = "_recompute"  # of the names of what is computed again


def recomputed(training: TrainingGraph, plan: Plan, chosen: Sequence[Choice], folder: str = "") -> TrainingGraph:
    """The graph, with copies of nodes in the backward pass that compute values again right before they are needed.

    What waits elsewhere goes there after the last node of the forward pass that reads it.

    Args:
        training: the graph; it is not changed.
        plan: made of it.
        chosen: what is computed again, and what waits elsewhere.
        folder: where that is; empty for memory of the host.

    Raises:
        GraphError: something is chosen that needs what is neither saved nor can be computed again.
    """
    saved, dropped = {*plan.saved}, set[str]()
    for choice in chosen:
        dropped |= {*choice.dropped}
        saved |= {*choice.kept}
    model = ir.Model(training.model.graph.clone(), ir_version=training.model.ir_version)
    again = _Again(model.graph, saved - dropped)
    backward = [node for node in model.graph if is_backward(node)]
    begin: dict[ir.Node, list[ir.Value]] = {}
    for choice in chosen:
        if choice.moved is not None:
            begin.setdefault(backward[choice.at], []).append(again.offload(str(choice.moved.name), folder))
    for node in backward:
        for value in begin.get(node, ()):
            again.fetch(value, node)
        for index, value in enumerate(node.inputs):
            if value is not None and value.name in dropped:
                node.replace_input_with(index, again.value(value, node))
    return dataclasses.replace(training, model=model)


def views_again(training: TrainingGraph, names: Collection[str]) -> TrainingGraph:
    """The graph, with views of some inputs made again in the backward pass, which would keep their memory if saved.

    Args:
        training: the graph; it is not changed.
        names: of the inputs.
    """
    plan = make_plan(training)
    forward = [n for n in training.model.graph if not is_backward(n)]
    found = [(v, owner) for v, owner in owners(forward).items() if owner.name in names and v.name in plan.saved]
    chosen = [Choice((str(v.name),), (str(owner.name),), (v,), at=0, gain=0, seconds=0.0) for v, owner in found]
    return recomputed(training, plan, chosen) if chosen else training


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
        self._away: dict[ir.Value, ir.Value] = {}  # what stands for a value that waits elsewhere
        self._under_way: dict[ir.Value, ir.Value] = {}

    @functools.cached_property
    def _last(self) -> dict[str, tuple[ir.Value, ir.Node]]:
        """By name each value with memory of its own, and the last node of the forward pass that reads it."""
        forward = [n for n in self.graph if not is_backward(n)]
        sources = owners(forward)
        read = ((sources.get(v, v), n) for n in forward for v in (*n.outputs, *n.inputs) if v is not None)
        return {str(value.name): (value, node) for value, node in read}

    def offload(self, name: str, folder: str) -> ir.Value:
        """Let a value wait elsewhere for the backward pass."""
        value, last = self._last[name]
        moved = ir.Node(DOMAIN, "Offload", [value], attributes=[ir.AttrString("folder", folder)])
        self.graph.insert_after(last, moved)
        shapes.infer(moved)
        self._call(moved, f"{name}_away", value)
        moved.outputs[0].name = free_name(f"{name}_away", self.names)
        self.names.add(str(moved.outputs[0].name))
        self._away[value] = moved.outputs[0]
        return value

    def fetch(self, value: ir.Value, before: ir.Node) -> None:
        """Begin to bring a value back, unless it was needed already."""
        if value not in self._under_way:
            self._under_way[value] = self._transfer("Fetch", self._away[value], value, before)

    def _transfer(self, op_type: str, source: ir.Value, value: ir.Value, before: ir.Node) -> ir.Value:
        node = ir.Node(DOMAIN, op_type, [source])
        node.meta[BACKWARD] = node.meta[RECOMPUTED] = True
        self.graph.insert_before(before, node)
        self._call(node, f"{value.name}_fetched", value)
        self._describe(value, node.outputs[0], "_fetched")
        return node.outputs[0]

    def _call(self, node: ir.Node, name: str, value: ir.Value) -> None:
        """Give a node a name, and the source line of what made a value."""
        node.name = free_name(name, self.node_names)
        self.node_names.add(node.name)
        maker = value.producer()
        assert maker is not None  # what nobody makes is saved
        node.metadata_props.update(maker.metadata_props)

    def value(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """A value as the backward pass has it: saved, fetched, or computed again before a node."""
        node = value.producer()
        if value in self.copies:
            return self.copies[value]
        if value in self._away:
            self.fetch(value, before)
            self.copies[value] = self._transfer("Fetched", self._under_way[value], value, before)
            return self.copies[value]
        if value.name in self.saved or node is None or shapes.data_of(value) is not None:
            return value
        copy = self._copy(node, value, before)
        self._call(copy, f"{node.name or node.outputs[0].name}{_SUFFIX}", value)
        copy_notes(node, copy)
        copy.meta[BACKWARD] = copy.meta[RECOMPUTED] = True
        for old, new in zip(made_with(value), copy.outputs, strict=False):
            self._describe(old, new, _SUFFIX)
            self.copies[old] = new
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
        if not gives_the_same(node):
            raise GraphError(f"{node.op_type} gives something else when it runs again", node=describe(node))
        inputs = [None if v is None else self.value(v, before) for v in node.inputs]
        stated = list(node.attributes.values())
        return ir.Node(node.domain, node.op_type, inputs, attributes=stated, num_outputs=len(node.outputs))

    def _state(self, node: ir.Node) -> Sequence[ir.Value]:
        """What the forward pass notes before it draws a mask: a state of the generator, and the order in memory."""
        op = Builder(self.graph, before=node, names=self.names)
        return op.node("RandomState", [node.inputs[0]], domain=DOMAIN, outputs=2).outputs

    def _describe(self, old: ir.Value, new: ir.Value, suffix: str) -> None:
        if old.name:
            new.name = free_name(f"{old.name}{suffix}", self.names)
            self.names.add(new.name)
        new.type, new.shape = old.type, old.shape
        copy_notes(old, new)
