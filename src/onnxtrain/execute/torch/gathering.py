"""Where a program gathers parameters that are in shards, and gives them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.execute.torch.codegen import Writer
from onnxtrain.execute.torch.memory import Groups
from onnxtrain.execute.torch.registry import Lowering
from onnxtrain.ir.shards import Shards

_APART = 4  # groups of which one may be given back while they are read


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
    for index, spans in enumerate(_spans(writer.nodes, writer.lowerings, groups, _APART if shards.again else None)):
        for first, last in spans:
            writer.around.setdefault(first, ([], []))[0].append(f"shards.{enter}({index})")
            writer.around.setdefault(last, ([], []))[1].append(f"shards.{leave}({index})")


def _spans(
    nodes: Sequence[ir.Node],
    lowerings: Mapping[ir.Node, Lowering],
    groups: Sequence[Collection[ir.Value]],
    apart: int | None,
) -> list[list[tuple[ir.Node, ir.Node]]]:
    """For each group of inputs the first and the last node that reads memory of one.

    Args:
        nodes: of the program.
        lowerings: of the nodes.
        groups: the inputs of each group.
        apart: more than so many others that are read between two reads of a group end its span, and the second read
            begins another; None where a group has one at most.
    """
    root = Groups(nodes, lowerings).root
    owners: dict[ir.Value, set[int]] = {}  # one memory may be of several: a user's function may return any input
    for index, value in ((index, value) for index, group in enumerate(groups) for value in group):
        owners.setdefault(root(value), set()).add(index)
    found: list[list[tuple[ir.Node, ir.Node]]] = [[] for _ in groups]
    between: list[set[int]] = [set() for _ in groups]  # the others that were read since the latest read of each
    for node in nodes:
        read = set[int]().union(*(owners.get(root(v), ()) for v in node.inputs if v is not None))
        for index in sorted(read):
            spans = found[index]
            if spans and (apart is None or len(between[index]) <= apart):
                spans[-1] = (spans[-1][0], node)
            else:
                spans.append((node, node))
            between[index].clear()
        for index, others in enumerate(between):
            others |= read - {index}
    return found
