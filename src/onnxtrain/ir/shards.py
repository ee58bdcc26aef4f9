"""Inputs of a graph that are whole only while its nodes read them: parameters that several processes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import onnx_ir as ir


class Shards(Protocol):
    """What gathers groups of inputs before the first node that reads one, and gives them back after the last.

    In the backward pass a group is given back when its gradients are there, too: where these go is no concern of who
    runs the graph.
    """

    @property
    def groups(self) -> Sequence[frozenset[str]]:
        """The names of the inputs of each group."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The processes that gather together, among all that train."""
        ...

    def gathered(self, tensors: Sequence[Any]) -> list[Any]:
        """For inputs in shards the gathered ones, which have content while a program has entered their group."""
        ...

    def enter(self, group: int) -> None:
        """A node of the forward pass is about to read a group."""

    def leave(self, group: int) -> None:
        """No further node of the forward pass reads a group."""

    def begin_backward(self, gradients: Sequence[int]) -> None:
        """A backward pass begins, which gives so many gradients for the inputs of each group."""

    def enter_backward(self, group: int) -> None:
        """A node of the backward pass is about to read a group."""

    def leave_backward(self, group: int) -> None:
        """No further node of the backward pass reads a group."""


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What gathers inputs of a graph, and in which order.

    Every process gathers together with the others, so the order is of the graph that all of them have, whatever each
    makes of it for its batch.

    Args:
        shards: gathers them.
        forward: order of its groups in the forward pass, by the first nodes that read them.
        backward: order in the backward pass, by the last ones.
    """

    shards: Shards
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def gathering_of(graph: ir.Graph, shards: Shards) -> Gathering:
    """What gathers inputs of a graph, in the order in which it reads them."""
    group_of = {name: index for index, group in enumerate(shards.groups) for name in group}
    inputs = {v: group_of[str(v.name)] for v in graph.inputs if v.name in group_of}

    def order(nodes: Iterable[ir.Node]) -> tuple[int, ...]:
        read = (inputs[v] for node in nodes for v in node.inputs if v in inputs)
        return tuple(dict.fromkeys([*read, *range(len(shards.groups))]))

    return Gathering(shards, order(graph), order(reversed(graph)))
