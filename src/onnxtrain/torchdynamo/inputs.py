"""The inputs of a graph that Dynamo hands over: whose they are, and under which names."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.torchdynamo.writes import memory

_PART = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_TABLES = frozenset(("_modules", "_parameters", "_buffers", "__dict__"))
_TAKEN = frozenset(dir(torch.nn.Module()))  # what is an attribute of each module is no name of a part
_FRAMES = frozenset(("self", "args", "kwargs"))  # names that say nothing of an input
_WEIGHT = re.compile(r"\._(parameters|buffers)\['[^']*'\]$")


class Role(enum.Enum):
    """What an input is."""

    TENSOR = "tensor"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SIZE = "size"  # of another input
    NUMBER = "number"
    WRAPPED = "wrapped number"  # Python's, which Dynamo passes as a tensor


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of a graph.

    Args:
        name: what the user calls it.
        role: what it is.
        node: the placeholder; None where it does not matter.
        is_written: whether the program changes it in place.
        axis: for a size, the position of a tensor among the inputs and the axis that has this size.
        is_free: whether it has symbolic sizes, or is a number that may be any.
    """

    name: str
    role: Role
    node: Node | None
    is_written: bool = False
    axis: tuple[int, int] = (0, 0)
    is_free: bool = False


def inputs_of(graph: torch.fx.Graph, examples: Sequence[Any], written: Collection[Any]) -> tuple[Input, ...]:
    """The inputs of a graph, in order.

    Args:
        graph: the graph.
        examples: what Dynamo passes for each, where it does not say it in the graph.
        written: the memories that the graph writes.
    """
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    examples = [node.meta.get("example_value", x) for node, x in zip(nodes, examples, strict=True)]
    axes = _axes(nodes, examples)
    names, paths = set(), set()
    found = []
    for node, example in zip(nodes, examples, strict=True):
        is_written = memory(example) in written
        role, axis = _role(node, example, is_written, axes)
        name = _unused(_name(node, role), names, paths)
        names.add(name)
        paths |= _paths(name)
        found.append(Input(name, role, node, is_written and role is not Role.BUFFER, axis, _is_free(example)))
    return tuple(found)


def _role(node: Node, example: Any, written: bool, axes: dict[Any, tuple[int, int]]) -> tuple[Role, tuple[int, int]]:
    if not isinstance(example, torch.Tensor):
        known = axes.get(_expression(example)) if isinstance(example, torch.SymInt) else None
        return (Role.NUMBER, (0, 0)) if known is None else (Role.SIZE, known)
    argument = node.meta.get("grapharg")
    if getattr(argument, "pass_arg_as_tensor", False) and all(_is_item(user) for user in node.users):
        return Role.WRAPPED, (0, 0)
    table = _WEIGHT.search(_source(node))
    if table is not None and table[1] == "buffers":
        return Role.BUFFER, (0, 0)
    if isinstance(example, torch.nn.Parameter) and not written:
        return Role.PARAMETER, (0, 0)
    return Role.TENSOR, (0, 0)


def _is_free(example: Any) -> bool:
    if isinstance(example, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in example.shape)
    return isinstance(example, torch.SymInt)


def _is_item(node: Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _axes(nodes: Sequence[Node], examples: Sequence[Any]) -> dict[Any, tuple[int, int]]:
    """For each symbolic size of a tensor of the user's, the tensor and the axis that have it."""
    found: dict[Any, tuple[int, int]] = {}
    for position, (node, example) in enumerate(zip(nodes, examples, strict=True)):
        is_tensor = isinstance(example, torch.Tensor) and not isinstance(example, torch.nn.Parameter)
        if is_tensor and _WEIGHT.search(_source(node)) is None:
            for axis, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(_expression(size), (position, axis))
    return found


def _source(node: Node) -> str:
    """Where Dynamo read an input: ``L['self']._modules['lin']._parameters['weight']``; empty where it does not say."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return "" if source is None else str(source.name)


def _name(node: Node, role: Role) -> str:
    """What the user calls an input: ``lin.weight``, ``input_ids``."""
    source = _source(node)
    parts = [next(filter(None, found)) for found in _PART.findall(source) if any(found)]
    if _WEIGHT.search(source) or role in (Role.PARAMETER, Role.BUFFER):
        inner = [re.sub(r"\W+", "_", p) for p in parts if p not in _TABLES]
        inner = [f"{p}_" if p in _TAKEN else p for p in inner]
        is_named = len(inner) == 2 and inner[0] not in _FRAMES  # a layer that a function reads by its name
        return ".".join(inner if is_named else inner[1:] or inner) or node.name
    parts = [p for p in parts if p not in _TABLES]
    parts = parts[1:] if len(parts) > 1 and parts[0] in _FRAMES and not parts[1].isdigit() else parts
    return re.sub(r"\W+", "_", "_".join(parts)).strip("_") or node.name


def _paths(name: str) -> set[str]:
    """The modules that hold a weight of this name."""
    return {name[:i] for i, letter in enumerate(name) if letter == "."}


def _unused(name: str, names: Collection[str], paths: Collection[str]) -> str:
    """The name; another one where an input or a module has it, or where an input has that of its module."""
    if name not in names and name not in paths and not _paths(name) & {*names}:
        return name
    flat = name.replace(".", "_")
    others = itertools.chain((flat,), (f"{flat}_{i}" for i in itertools.count(1)))
    return next(n for n in others if n not in names and n not in paths)
