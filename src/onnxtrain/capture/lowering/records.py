"""What a recorded call says of itself: its operator's name, its arguments, the memory of what it returned."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


def name_of(target: Any) -> str:
    """An operator's name without its namespace."""
    return str(target._schema.name).split("::")[-1]


def arguments_of(node: Node) -> dict[str, Any]:
    """A call's arguments by name, but for those that it leaves out."""
    schema = node.target._schema  # type: ignore[union-attr]
    return {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)


def memory_of(value: Any) -> int | None:
    """Which memory a tensor is in, or the tensors of a sequence."""
    if isinstance(value, list | tuple):
        return next((m for m in map(memory_of, value) if m is not None), None)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # under vmap, whose calls are recorded once more
        return None
    return value.untyped_storage()._cdata
