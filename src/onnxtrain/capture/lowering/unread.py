"""Calls of a lowered program whose results nothing reads."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from onnxtrain.capture.lowering.records import arguments_of
from onnxtrain.ir.graphs import DRAWN


def remove_unread_numbers(graph: Graph) -> None:
    """Take away the numbers that only checks read."""
    for node in reversed(list(graph.nodes)):
        is_number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        if node.op == "call_function" and is_number and not node.users:
            graph.erase_node(node)


def mark_unread_draws(graph: Graph) -> None:
    """Mark the calls that draw random numbers for nobody: those that come after them are eager's only if they do."""
    read: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in read:
            read.update(node.all_input_nodes)
        elif _draws(node):
            node.meta[DRAWN] = True
            read.update(node.all_input_nodes)


def _draws(node: Node) -> bool:
    """Whether a call takes numbers from torch's generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    named = arguments_of(node)
    ratio = named.get("dropout_p", named.get("p") if "dropout" in target.__name__ else None)
    return ratio != 0 and named.get("train", True) is not False and named.get("training", True) is not False
