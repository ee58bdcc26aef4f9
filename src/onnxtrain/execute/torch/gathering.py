"""Where a program gathers parameters that are in shards, and gives them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.execute.torch.codegen import Writer
from onnxtrain.execute.torch.memory import Groups
from onnxtrain.execute.torch.registry import Lowering
from onnxtrain.ir.shards import Shards


def gather(writer: Writer, shards: Shards, groups: Sequence[Collection[ir.Value]], enter: str, leave: str) -> None:
    """Have lines that gather inputs before the first node that reads them, and give them back after the last.

    Args:
        writer: of the program.
        shards: what gathers them.
        groups: the inputs of each group.
        enter: its method that gathers one.
        leave: its method that gives one back.
    """
    writer.scope["shards"] = shards
    for index, span in enumerate(_spans(writer.nodes, writer.lowerings, groups)):
        if span is not None:
            writer.around.setdefault(span[0], ([], []))[0].append(f"shards.{enter}({index})")
            writer.around.setdefault(span[1], ([], []))[1].append(f"shards.{leave}({index})")


def _spans(
    nodes: Sequence[ir.Node], lowerings: Mapping[ir.Node, Lowering], groups: Sequence[Collection[ir.Value]]
) -> list[tuple[ir.Node, ir.Node] | None]:
    """For each group of inputs the first and the last node that reads memory of one; None where none does."""
    root = Groups(nodes, lowerings).root
    owner = {root(value): index for index, group in enumerate(groups) for value in group}
    found: list[tuple[ir.Node, ir.Node] | None] = [None] * len(groups)
    for node in nodes:
        for index in {owner[r] for v in node.inputs if v is not None and (r := root(v)) in owner}:
            span = found[index]
            found[index] = (node if span is None else span[0], node)
    return found
