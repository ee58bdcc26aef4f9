"""Outputs that no graph needs to compute: inputs, views of inputs and of other outputs, and sizes.

They are made by PyTorch after each call, of the tensors themselves, so that they share memory with what they are views
of, and gradients find their way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

_VIEWS = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "contiguous", "to", "alias"),
        *("t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "numpy_T"),
        *("getitem", "__getitem__", "select", "narrow", "diagonal", "unfold", "as_strided", "getattr"),
        *("unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "detach", "view_as_real", "view_as_complex"),
        *("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit"),
        *("float", "double", "half", "bfloat16", "long", "int", "bool", "type", "cpu", "cuda", "type_as"),
    )
)
_IN_PLACE = frozenset(("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor"))
_OTHER_SHAPE = frozenset(
    ("t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "resize_", "resize_as_")
)
_LARGEST = 64  # calls


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the outputs of a graph are made.

    Args:
        listed: all outputs: nodes, and constants.
        kept: the nodes that the graph computes.
        calls: the calls that are made after it, in order.
    """

    listed: tuple[Any, ...]
    kept: tuple[Node, ...]
    calls: tuple[Node, ...]

    def values(self, inputs: Mapping[Node, Any], computed: Sequence[Any]) -> tuple[Any, ...]:
        """All outputs of a call.

        Args:
            inputs: what the placeholders are.
            computed: what the graph computed.
        """
        known: dict[Node, Any] = {**inputs, **dict(zip(self.kept, computed, strict=True))}
        for node in self.calls:
            known[node] = _call(node, known)
        return tuple(known[x] if isinstance(x, Node) else x for x in self.listed)


def outputs_of(graph: torch.fx.Graph) -> Outputs:
    """How the outputs of a graph are made best."""
    (last,) = (node for node in graph.nodes if node.op == "output")
    (listed,) = last.args
    listed = tuple(listed) if isinstance(listed, tuple | list) else (listed,)
    nodes = [x for x in dict.fromkeys(listed) if isinstance(x, Node)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    kept: list[Node] = []
    calls: set[Node] = set()
    for node in sorted(nodes, key=order.__getitem__):
        needed = _calls(node, kept)
        if needed is None:
            kept.append(node)
        else:
            calls |= needed
    return Outputs(listed, tuple(kept), tuple(sorted(calls, key=order.__getitem__)))


def _calls(node: Node, known: Collection[Node]) -> set[Node] | None:
    """The calls that make a value of inputs and known values without computing anything; None where there are none."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder" or current in known or current in found:
            continue
        sources = _sources(current)
        if sources is None or len(found) > _LARGEST:
            return None
        found.add(current)
        waiting += sources
    return found


def _sources(node: Node) -> list[Node] | None:
    """What a view, or a size, is made of; None where a node is neither."""
    if node.op not in ("call_method", "call_function"):
        return None
    example = node.meta.get("example_value")
    if _is_size(example):
        numbers = all(not isinstance(n.meta.get("example_value"), torch.Tensor) for n in node.all_input_nodes)
        return list(node.all_input_nodes) if numbers or node.target in ("size", getattr) else None
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or _memory(example) is None or _memory(example) != _memory(_example(first)):
        return None
    if _is_in_place(node):
        return [first]
    return list(node.all_input_nodes) if _function(node) in _VIEWS else None


def _is_size(example: Any) -> bool:
    """Whether something is a size, or several."""
    if isinstance(example, tuple | list):
        return all(map(_is_size, example))
    return isinstance(example, int | torch.SymInt) and not isinstance(example, bool)


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _memory(example: Any) -> Any:
    """What identifies the memory of a tensor, or of all tensors of a tuple; None where there is none."""
    if isinstance(example, tuple | list) and example:
        found = {_memory(x) for x in example}
        return found.pop() if len(found) == 1 else None
    is_plain = isinstance(example, torch.Tensor) and example.layout is torch.strided
    return example.untyped_storage()._cdata if is_plain else None


def _function(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_in_place(node: Node) -> bool:
    """Whether a call returns its first argument, which it wrote to."""
    name = _function(node)
    if name in _IN_PLACE or node.kwargs.get("inplace") is True:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _OTHER_SHAPE


def _call(node: Node, known: Mapping[Node, Any]) -> Any:
    """A view made again; a tensor that was written in place is itself."""
    example = _example(node)
    if isinstance(example, torch.Tensor) and _is_in_place(node):
        return known[node.args[0]]  # type: ignore[index]
    args: Any = torch.fx.map_arg(node.args, known.__getitem__)
    kwargs: Any = torch.fx.map_arg(node.kwargs, known.__getitem__)
    function = node.target if callable(node.target) else getattr(args[0], node.target)
    made = function(*(args if callable(node.target) else args[1:]), **kwargs)
    if isinstance(made, torch.Tensor) and made.requires_grad and not example.requires_grad:
        return made.detach()  # it was made where gradients are off
    return made
