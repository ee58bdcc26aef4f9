"""Reshaped gradients, of which PyTorch makes views or copies by how they lie in memory: no trace knows that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.errors import CaptureError

_GRADIENTS = "onnxtrain::gradients"
_VIEW_OR_COPY = frozenset(("reshape", "flatten", "ravel", "contiguous", "reshape_as"))


class OpenViews:
    """The calls that give a view of a gradient or a copy.

    Args:
        memory_of: the memory that a tensor is in, as the trace has it.
        views_above: what a recorded tensor is a view of, one after the other, the tensor itself first.
    """

    def __init__(self, memory_of: Callable[[Any], int | None], views_above: Callable[[Node], Iterable[Node]]) -> None:
        self._memory_of, self._views_above = memory_of, views_above
        self._found: list[tuple[Node, Node]] = []

    def add(self, node: Node, first: Node | None) -> None:
        """A recorded call; ``first`` is the first tensor in the memory of what it was made of."""
        if first is not None and _name(node) in _VIEW_OR_COPY and _is_gradient(first):
            self._found.append((node, node.all_input_nodes[0]))

    def refuse(self, written: Node, known: Collection[Node]) -> None:
        """Raise where a write may be one to another tensor, too, that is read afterwards.

        Args:
            written: is written to.
            known: the calls so far.

        Raises:
            CaptureError: it may be.
        """
        for view, source in self._found:
            memory = self._memory_of(source.meta["val"])
            both = [n for n in known if self._is_of(n, view) or self._memory_of(n.meta.get("val")) == memory]
            others = [n for n in both if self._is_of(n, view) != self._is_of(written, view)]
            if written in both and any(reader not in known for other in others for reader in other.users):
                raise CaptureError(
                    f"the forward pass writes to a gradient, or to what {view.target} makes of it: whether they share "
                    "memory is not known before it runs",
                    cure="write to a copy, g = g.clone()",
                )

    def _is_of(self, node: Node, view: Node) -> bool:
        """Whether a tensor is the view, or a view of it."""
        return view in self._views_above(node)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).split("::")[-1]


def _is_gradient(node: Node) -> bool:
    call = node.args[0] if node.target is operator.getitem else node
    target = call.target if isinstance(call, Node) else None
    return isinstance(target, torch._ops.OpOverload) and target.name() == _GRADIENTS
