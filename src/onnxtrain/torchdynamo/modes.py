"""How gradients are recorded at each call of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import Node


class Modes(NamedTuple):
    """The modes of a call.

    Args:
        gradients: whether gradients are on; None where it is as outside of the graph.
        inference: what ``torch.inference_mode`` was entered with; None where it was not.
    """

    gradients: bool | None = None
    inference: bool | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What is called within is called in these modes."""
        with contextlib.ExitStack() as stack:
            if self.inference is not None:
                stack.enter_context(torch.inference_mode(self.inference))
            if self.gradients is not None:
                stack.enter_context(torch.set_grad_enabled(self.gradients))
            yield


def modes_of(graph: torch.fx.Graph) -> dict[Node, Modes]:
    """The modes at each node of a graph."""
    found: dict[Node, Modes] = {}
    current = Modes()
    for node in graph.nodes:
        found[node] = current
        if node.target is torch._C._set_grad_enabled:
            current = current._replace(gradients=bool(node.args[0]))
        elif node.target is _enter_inference_mode:
            current = Modes(None, bool(node.args[0]))
        elif node.target is _exit_inference_mode:
            current = found[node.args[0]]  # type: ignore[index]
    return found
