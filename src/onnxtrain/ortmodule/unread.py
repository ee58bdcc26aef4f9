"""Which attributes no graph of a module reads: what is put there, and changes in it, is no reason for another graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from onnxtrain.capture import Attribute, Captured, attributes_of, owners_of


class Unread:
    """The attributes that each graph which met them left unread; of which there is none before the first graph."""

    def __init__(self) -> None:
        self._found: set[Attribute] = set()
        self._others: set[Attribute] = set()  # that some graph has read, or may have read

    def learn(self, captured: Captured, module: torch.nn.Module) -> None:
        """Take what a graph has read.

        Args:
            captured: the graph.
            module: the module.
        """
        there = {(type(owner), name) for owner in owners_of(module) for name in attributes_of(owner)}
        self._others |= captured.read | (there - captured.unread)
        self._found = (self._found | captured.unread) - self._others

    def holds(self, owner: Any, name: str) -> bool:
        """Whether an attribute is among them."""
        return (type(owner), name) in self._found

    def among(self, owners: Iterable[Any]) -> list[tuple[str, ...]]:
        """The names of those that some owners have: a graph that was there before them has met none."""
        return [tuple(n for n in attributes_of(owner) if self.holds(owner, n)) for owner in owners]
