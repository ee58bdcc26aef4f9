"""What a recorded call says of itself: its operator's name, its arguments, the memory of what it returned."""

from __future__ import annotations

import operator
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


def given_for(part: Node) -> Node | None:
    """Of a call that makes a list of a list, ``broadcast_tensors`` say: what it was given for this one."""
    call: Any = part.args[0] if part.target is operator.getitem else None
    given = call.args[0] if isinstance(call, Node) and call.args else None
    several = isinstance(given, list | tuple) and isinstance(call.meta.get("val"), list | tuple)
    return given[part.args[1]] if several and len(given) == len(call.meta["val"]) else None  # type: ignore[index,return-value]
