"""Parameters and buffers that lie in each other's memory: a graph has them as inputs of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.capture.found_elsewhere import by_memory
from onnxtrain.capture.keepers import node_of
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.source_lines import user_line
from onnxtrain.errors import CaptureError


def refuse_shared(had: Mapping[str, torch.Tensor], has: Mapping[str, torch.Tensor], written: Collection[str]) -> None:
    """Raise where a call writes to one and reads another that would show it; one of several names is no other.

    Args:
        had: the tensors that the module has outside of the trace, by name.
        has: those of the trace.
        written: the names of those that the call writes to.

    Raises:
        CaptureError: it does.
    """
    mode: Any = get_proxy_mode()
    used = {n: t for n, t in had.items() if n in has and _is_used(node_of(mode.tracer, has[n]))}
    memories = {name: names for names in by_memory(used) for name in names}
    for name in filter(memories.__contains__, written):  # a view that torch knows counts what is written to its whole
        own = used[name]
        beside = (n for n in memories[name] if used[n] is not own and overlap(own, used[n]))
        if (read := next(beside, None)) is not None:
            raise CaptureError(
                f"the forward pass writes to {name}, which shares memory with {read}",
                source=line_of_write(mode.tracer.graph, has[name]),
                cure=f"register one of them, and take a view of it in forward; or register a copy, {read}.clone()",
            )


def _is_used(node: torch.fx.Node | None) -> bool:
    """Whether anything was recorded of a tensor, be it that it was changed, which makes a call its node."""
    return node is not None and (node.op != "placeholder" or bool(node.users))


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether there may be elements that two tensors of one memory both have.

    Of flattened weights there are none; nor of columns of one matrix, which begin and end apart in each of its rows.
    """
    places = [_Place.of(tensor) for tensor in (first, second)]
    while max(p.start for p in places) < min(p.end for p in places):
        row = max((step for p in places for step, _ in p.axes), default=0)
        places = [p.within(row) for p in places] if row else []
        if not places or any(p.end > row for p in places):
            return True
    return False


class _Place(NamedTuple):
    """Where in its memory a tensor lies, in bytes.

    Args:
        start: where it begins.
        size: that of an element.
        axes: the step of each axis, and how many steps there are.
    """

    start: int
    size: int
    axes: list[tuple[int, int]]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        """Where a tensor lies."""
        size = tensor.itemsize
        axes = [(s * size, n - 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s]
        return cls(int(tensor.storage_offset() * size), size, axes)

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.start + sum(step * count for step, count in self.axes) + self.size

    def within(self, row: int) -> _Place:
        """Where its elements lie within rows of so many bytes."""
        return _Place(self.start % row, self.size, [axis for axis in self.axes if axis[0] != row])


def line_of_write(graph: torch.fx.Graph, tensor: torch.Tensor) -> str:
    """The user's line whose call writes to a tensor, or to a view of it."""
    for node in graph.nodes:
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        given = [n.meta.get("val") for n in node.all_input_nodes] if writes else []
        if any(memory_of(value) == memory_of(tensor) for value in given):
            return user_line(node.meta.get("stack_trace") or "")
    return ""


__all__ = ["line_of_write", "overlap", "refuse_shared"]
