"""Reshaped gradients, of which PyTorch makes views or copies by how they lie in memory: no trace knows that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch.fx import Node

from onnxtrain.capture.lowering.records import memory_of, name_of
from onnxtrain.errors import CaptureError

_GRADIENTS = "onnxtrain::gradients"
_VIEW_OR_COPY = frozenset(("reshape", "flatten", "ravel", "contiguous", "reshape_as"))


class OpenViews:
    """The calls that give a view of a gradient or a copy.

    Args:
        first: the first tensor of each memory, which grows with the record.
        views_above: what a recorded tensor is a view of, one after the other, the tensor itself first.
    """

    def __init__(self, first: Mapping[int, Node], views_above: Callable[[Node], Iterable[Node]]) -> None:
        self._first, self._views_above = first, views_above
        self._found: list[tuple[Node, Node]] = []

    def add(self, node: Node) -> None:
        """A recorded call."""
        if not isinstance(node.target, torch._ops.OpOverload) or name_of(node.target) not in _VIEW_OR_COPY:
            return
        source = node.all_input_nodes[0]
        memory = memory_of(source.meta["val"])
        if memory is not None and memory in self._first and _is_gradient(self._first[memory]):
            self._found.append((node, source))

    def refuse(self, written: Node, known: Collection[Node]) -> None:
        """Raise where a write may be one to another tensor, too, that is read afterwards.

        Args:
            written: is written to.
            known: the calls so far.

        Raises:
            CaptureError: it may be.
        """
        for view, source in self._found:
            memory = memory_of(source.meta["val"])
            both = [n for n in known if self._is_of(n, view) or memory_of(n.meta.get("val")) == memory]
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


def _is_gradient(node: Node) -> bool:
    call = node.args[0] if node.target is operator.getitem else node
    target = call.target if isinstance(call, Node) else None
    return isinstance(target, torch._ops.OpOverload) and target.name() == _GRADIENTS
