"""Inputs of a graph that are whole only while its nodes read them: parameters that several processes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Shards(Protocol):
    """What gathers groups of inputs before the first node that reads one, and gives them back after the last.

    In the backward pass a group is given back when its gradients are there, too: where these go is no concern of who
    runs the graph.

    Attributes:
        again: whether a group is given back within a pass and gathered again, where nodes between read others.
    """

    again: bool

    @property
    def groups(self) -> Sequence[frozenset[str]]:
        """The names of the inputs of each group."""
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
