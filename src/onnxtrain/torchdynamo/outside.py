"""Outputs that no graph needs to compute: inputs, views of inputs and of other outputs, and sizes.

They are made by PyTorch after each call, of the tensors themselves, so that they share memory with what they are views
of, and gradients find their way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from onnxtrain.torchdynamo.modes import Modes, modes_of
from onnxtrain.torchdynamo.writes import example, function, memory

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
_OTHER_SHAPE = frozenset(
    (
        "t_",
        "transpose_",
        "squeeze_",
        "unsqueeze_",
        "swapaxes_",
        "swapdims_",
        "as_strided_",
        "resize_",
        "resize_as_",
        "set_",
        "shallow_copy_data_",
    )
)
_LARGEST = 64  # calls


class Call(NamedTuple):
    """A call that is made outside of a graph.

    Args:
        node: the call.
        itself: what it returns as it is: a tensor that it wrote; None for a view or a size.
        modes: how gradients are recorded there.
    """

    node: Node
    itself: Node | None
    modes: Modes


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
    calls: tuple[Call, ...]

    def values(self, inputs: Mapping[Node, Any], computed: Sequence[Any]) -> tuple[Any, ...]:
        """All outputs of a call.

        Args:
            inputs: what the placeholders are.
            computed: what the graph computed.
        """
        known: dict[Node, Any] = {**inputs, **dict(zip(self.kept, computed, strict=True))}
        for call in self.calls:
            known[call.node] = _made(call, known) if call.itself is None else known[call.itself]
        return tuple(known[x] if isinstance(x, Node) else x for x in self.listed)


def outputs_of(graph: torch.fx.Graph) -> Outputs:
    """How the outputs of a graph are made best."""
    (last,) = (node for node in graph.nodes if node.op == "output")
    (listed,) = last.args
    listed = tuple(listed) if isinstance(listed, tuple | list) else (listed,)
    nodes = [x for x in dict.fromkeys(listed) if isinstance(x, Node)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    same, reshaped = _same(graph), _reshaped(graph)
    kept: list[Node] = []
    calls: set[Node] = set()
    for node in sorted(nodes, key=order.__getitem__):
        needed = _calls(node, kept, same, reshaped)
        if needed is None:
            kept.append(node)
        else:
            calls |= needed
    modes = modes_of(graph)
    made = (Call(node, same.get(node), modes[node]) for node in sorted(calls, key=order.__getitem__))
    return Outputs(listed, tuple(kept), tuple(made))


def _same(graph: torch.fx.Graph) -> dict[Node, Node]:
    """For each call that returns a tensor that there was before, what had it first: Dynamo's tensor is the same too."""
    first: dict[int, Node] = {}
    for node in graph.nodes:
        if isinstance(example(node), torch.Tensor):
            first.setdefault(id(example(node)), node)
    earlier = ((node, first.get(id(example(node)))) for node in graph.nodes)
    return {node: source for node, source in earlier if source is not None and source is not node}


def _reshaped(graph: torch.fx.Graph) -> set[Node]:
    """What has another shape in the end: of that, a view made after the graph would be one of another tensor."""
    calls = (node for node in graph.nodes if function(node) in _OTHER_SHAPE and node.all_input_nodes)
    changed = {id(example(node.all_input_nodes[0])) for node in calls}
    return {node for node in graph.nodes if isinstance(example(node), torch.Tensor) and id(example(node)) in changed}


def _calls(node: Node, known: Collection[Node], same: Mapping[Node, Node], reshaped: Set[Node]) -> set[Node] | None:
    """The calls that make a value of inputs and known values without computing anything; None where there are none."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder" or current in known or current in found:
            continue
        sources = [same[current]] if current in same else _sources(current)
        is_lost = current not in same and not reshaped.isdisjoint(sources or ())
        if sources is None or is_lost or len(found) > _LARGEST:
            return None
        found.add(current)
        waiting += sources
    return found


def _sources(node: Node) -> list[Node] | None:
    """What a view, or a size, is made of; None where a node is neither."""
    if node.op not in ("call_method", "call_function"):
        return None
    value = example(node)
    if _is_size(value):
        numbers = all(not isinstance(example(n), torch.Tensor) for n in node.all_input_nodes)
        return list(node.all_input_nodes) if numbers or node.target in ("size", getattr) else None
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or memory(value) is None or memory(value) != memory(example(first)):
        return None
    return list(node.all_input_nodes) if function(node) in _VIEWS else None


def _is_size(value: Any) -> bool:
    """Whether something is a size, or several."""
    if isinstance(value, tuple | list):
        return all(map(_is_size, value))
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _made(call: Call, known: Mapping[Node, Any]) -> Any:
    """A view or a size made again, in the modes in which the program makes it."""
    args: Any = torch.fx.map_arg(call.node.args, known.__getitem__)
    kwargs: Any = torch.fx.map_arg(call.node.kwargs, known.__getitem__)
    target = call.node.target
    function = target if callable(target) else getattr(args[0], target)
    with call.modes.entered():
        return function(*(args if callable(target) else args[1:]), **kwargs)
