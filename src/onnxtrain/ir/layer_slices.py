"""The layers that the nodes of a short graph belong to.

It is told by what nodes depend on, not by where they came from, so that it holds after any stage. In the forward pass
a node belongs to the latest layer whose parameters it depends on, in the backward pass to the earliest. So each layer,
numbered 0 to 3, has a slice in either pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from onnxtrain.ir.functions import is_further
from onnxtrain.ir.graphs import is_backward
from onnxtrain.ir.layers import COPIED, KEPT, Layers

BEFORE, AFTER = -1, KEPT  # what depends on no layer: in the forward pass, in the backward pass
OUTSIDE = KEPT + 1  # outputs that every layer has: what depends on what is some layers further, or on no layer


def weights(graph: ir.Graph, layers: Sequence[Layers]) -> dict[ir.Node, int]:
    """How many nodes of the whole graph each node of a short one stands for, where that is more than one."""
    found: dict[ir.Node, int] = {}
    for row in layers:
        labels = Slices(graph, row).of_node
        found |= {n: found.get(n, 1) * (1 + row.missing) for n, label in labels.items() if label == COPIED}
    return found


class Slices:
    """The layers of a short graph's row to which its nodes and values belong.

    Args:
        graph: a short graph.
        layers: the row.
        gradients: name of a parameter or input to the output that is its gradient.

    Attributes:
        of_node: 0 to 3, or what is before, after or outside of all of them.
        of_value: the same.
    """

    def __init__(self, graph: ir.Graph, layers: Layers, gradients: Mapping[str, str] = MappingProxyType({})) -> None:
        self.of_value: dict[ir.Value, int] = {}
        for value in graph.inputs:
            place = layers.place(str(value.name))
            self.of_value[value] = BEFORE if place is None else place[0]
        self.of_node: dict[ir.Node, int] = {}
        nodes = list(graph)
        forward = [n for n in nodes if not is_backward(n)]
        for node in forward:
            if is_further(node) and node.attributes["prefix"].value == layers.prefix:
                self.put(node, OUTSIDE)
                continue
            self.put(node, max((self.of_value.get(v, BEFORE) for v in node.inputs if v is not None), default=BEFORE))
        self._within(forward)
        backward = [n for n in nodes if is_backward(n)]
        for node in backward:
            known = (self.of_value.get(v, BEFORE) for v in node.inputs if v is not None)
            self.put(node, min((label for label in known if label != BEFORE), default=AFTER))
        places = ((output, layers.place(name)) for name, output in gradients.items())
        self._ends(backward, {output: place[0] for output, place in places if place is not None})

    def put(self, node: ir.Node, label: int) -> None:
        """Let a node belong to a layer."""
        self.of_node[node] = label
        self.of_value.update(dict.fromkeys(node.outputs, label))

    def _within(self, forward: Sequence[ir.Node]) -> None:
        """What depends on no layer, but is computed for one of them alone, belongs to that one; for none, outside."""
        for node in reversed(forward):
            if self.of_node[node] != BEFORE:
                continue
            read = {use.node for v in node.outputs for use in v.uses()}
            if any(v.is_graph_output() for v in node.outputs):
                if not read:
                    self.put(node, OUTSIDE)
                continue
            labels = {self.of_node[reader] for reader in read if reader in self.of_node}  # not of the backward pass
            if len(labels) == 1:
                self.put(node, labels.pop())

    def _ends(self, backward: Sequence[ir.Node], results: Mapping[str, int]) -> None:
        """What is computed for the gradient of a parameter alone belongs to the parameter's layer."""
        ends: set[ir.Node] = set()
        for node in reversed(backward):
            read = {use.node for v in node.outputs for use in v.uses()}
            given = {results[str(v.name)] for v in node.outputs if v.name in results}
            labels = given | {self.of_node[reader] for reader in read}
            is_free = self.of_node[node] == AFTER
            if read <= ends and len(labels) == 1 and (is_free or min(labels) >= self.of_node[node]):
                ends.add(node)
                self.put(node, labels.pop())
