"""Where a program gathers parameters that are in shards, and gives them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.execute.torch.codegen import Writer
from onnxtrain.execute.torch.memory import Groups
from onnxtrain.execute.torch.registry import Lowering
from onnxtrain.ir.shards import Shards


def gather(
    writer: Writer, shards: Shards, groups: Sequence[Collection[ir.Value]], order: Sequence[int], enter: str, leave: str
) -> None:
    """Have lines that gather inputs before the first node that reads them, and give them back after the last.

    Groups are gathered in one order, so one may be earlier than it is read. What no node reads is given back at once.

    Args:
        writer: of the program.
        shards: what gathers them.
        groups: the inputs of each group.
        order: in which the groups are gathered.
        enter: its method that gathers one.
        leave: its method that gives one back.
    """
    writer.scope["shards"] = shards
    if not writer.nodes:
        return
    spans, end = _spans(writer.nodes, writer.lowerings, groups), len(writer.nodes)
    begin: dict[int, int] = {}
    for index in reversed(order):
        end = begin[index] = min(end, spans[index][0] if index in spans else end)
    for index in order:
        is_after = begin[index] == len(writer.nodes)  # no node reads it, nor one that comes later in the order
        before, after = _around(writer, begin[index] - 1 if is_after else begin[index])
        lines = after if is_after else before
        lines.append(f"shards.{enter}({index})")
        if index in spans:
            lines = _around(writer, spans[index][1])[1]
        lines.append(f"shards.{leave}({index})")


def _around(writer: Writer, place: int) -> tuple[list[str], list[str]]:
    """The lines right before a node and right after."""
    return writer.around.setdefault(writer.nodes[place], ([], []))


def _spans(
    nodes: Sequence[ir.Node], lowerings: Mapping[ir.Node, Lowering], groups: Sequence[Collection[ir.Value]]
) -> dict[int, tuple[int, int]]:
    """For each group of inputs that is read the places of the first and the last node that reads memory of one."""
    root = Groups(nodes, lowerings).root
    owners: dict[ir.Value, set[int]] = {}  # one memory may be of several: a user's function may return any input
    for index, value in ((index, value) for index, group in enumerate(groups) for value in group):
        owners.setdefault(root(value), set()).add(index)
    found: dict[int, tuple[int, int]] = {}
    for place, node in enumerate(nodes):
        for index in set[int]().union(*(owners.get(root(v), ()) for v in node.inputs if v is not None)):
            found[index] = (found[index][0] if index in found else place, place)
    return found
