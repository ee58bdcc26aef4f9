"""Collections in which calls leave something and of which they read nothing: a log, what a list of losses has."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from onnxtrain.capture import LEFT_IN, Captured, Place, attribute, graph_bytes
from onnxtrain.ortmodule.values import told_apart


class LeftUnread:
    """Which they are, as captured calls show: two that found another content there and are one graph did not read it.

    Args:
        module: the module that holds them.

    Attributes:
        places: of those that are known.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known: list[tuple[Any, dict[Place, Any]]] = []
        self.places: set[Place] = set()

    def learn(self, captured: Captured) -> None:
        """Compare a captured call, whose module is still as it was before, with earlier ones."""
        held = {p: attribute(p.owner(self._module), p.name) for p in captured.left if p.kind in LEFT_IN}
        if not held.keys() - self.places:
            return
        found = {place: told_apart(value) for place, value in held.items()}
        graph = hashlib.sha256(graph_bytes(captured.graph)).digest()
        call = graph, captured.inputs, captured.outputs, captured.sources, captured.left, captured.path
        for other, before in self._known:
            if other == call:
                self.places |= {place for place in found if before[place] != found[place]}
        self._known.append((call, found))
