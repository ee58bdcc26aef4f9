"""Parameters and buffers that lie in each other's memory: a graph has them as inputs of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.capture.found_elsewhere import in_memory_of
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
    for name in filter(used.__contains__, written):  # a view that torch knows counts what is written to its whole
        own = used[name]
        beside = {id(t) for t in in_memory_of(own, used.values()) if t is not own and overlap(own, t)}
        if (read := next((n for n, t in used.items() if id(t) in beside), None)) is not None:
            raise CaptureError(
                f"the forward pass writes to {name}, which shares memory with {read}",
                source=_line_of_write(mode.tracer.graph, has[name]),
                cure=f"register one of them, and take a view of it in forward; or register a copy, {read}.clone()",
            )


def _is_used(node: torch.fx.Node | None) -> bool:
    """Whether anything was recorded of a tensor, be it that it was changed, which makes a call its node."""
    return node is not None and (node.op != "placeholder" or bool(node.users))


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether there may be elements that two tensors of one memory both have: of flattened weights there are none."""
    (start, end), (other_start, other_end) = map(_extent, (first, second))
    return start < other_end and other_start < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its memory a tensor begins and ends, in bytes."""
    start = tensor.storage_offset()
    last = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start * tensor.itemsize), int((last + 1) * tensor.itemsize)


def _line_of_write(graph: torch.fx.Graph, tensor: torch.Tensor) -> str:
    """The user's line whose call writes to a tensor, or to a view of it."""
    for node in graph.nodes:
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        given = [n.meta.get("val") for n in node.all_input_nodes] if writes else []
        if any(memory_of(value) == memory_of(tensor) for value in given):
            return user_line(node.meta.get("stack_trace") or "")
    return ""


__all__ = ["overlap", "refuse_shared"]
