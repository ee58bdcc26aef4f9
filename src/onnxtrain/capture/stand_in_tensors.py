"""What stand-ins give while a module is traced, and what becomes of it in the recorded program.

What a layer gives to the next one is taken out, so that the last layer reads what the third one gives. What it hands
to an object that keeps tensors by layer stays: which layer's it is, is told by how much further it is than the third.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from onnxtrain.capture.call_forms import form_of_value
from onnxtrain.capture.stand_in_modules import UnlikeError

_OTHERS = (bytes, complex)


@torch.library.custom_op("onnxtrain::like_layer", mutates_args=(), schema="(Tensor x, bool is_next) -> Tensor")
def like_layer(x: torch.Tensor, is_next: bool) -> torch.Tensor:
    """What a stand-in gives; it is taken out of the recorded calls, so that the layer after it reads ``x``."""
    raise RuntimeError("onnxtrain::like_layer stands for a layer while a module is traced; it does not run")


@torch.library.custom_op(
    "onnxtrain::layers_further", mutates_args=(), schema="(Tensor x, str prefix, int by) -> Tensor"
)
def layers_further(x: torch.Tensor, prefix: str, by: int) -> torch.Tensor:
    """What ``x``, of the third layer of the row at a path, is so many layers further (``ir.unfolding``)."""
    raise RuntimeError("onnxtrain::layers_further stands for a layer while a module is traced; it does not run")


def _like(x: torch.Tensor, *given: Any) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _no_gradient(ctx: Any, *dys: Any) -> Any:
    raise RuntimeError("a stand-in is differentiated in its graph")


for _operator in (like_layer, layers_further):
    _operator.register_fake(_like)
    _operator.register_autograd(_no_gradient)
_LIKE = torch.ops.onnxtrain.like_layer.default


def take_out(graph: torch.fx.Graph, lengths: Collection[int]) -> None:
    """Take out of a graph what stand-ins gave: chains as long as there are stand-ins, with nothing in between.

    Args:
        graph: of a recorded program.
        lengths: how many stand-ins the rows have.

    Raises:
        UnlikeError: a layer was read by something else than the layer after it.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    given = [node for node in graph.nodes if node.target is _LIKE]
    for node in given:
        source: Any = node.args[0]
        later = [n for n in source.users if order[n] > order[node]]
        is_read = node.args[1] and source.target is not _LIKE and later  # a layer that was traced
        is_shared = len(node.users) > 1 and any(n.target is _LIKE for n in node.users)
        if is_read or is_shared or (not node.args[1] and node.users):
            raise UnlikeError("what a layer gives is read by something else than the next layer")
        if node.args[1] and source.target is not _LIKE and _length(node) not in lengths:
            raise UnlikeError("something is done to what a layer gives before the next one has it")
    for node in given:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _length(node: torch.fx.Node | None) -> int:
    """How many stand-ins follow on each other from one on."""
    count = 0
    while node is not None:
        node, count = next((n for n in node.users if n.target is _LIKE), None), count + 1
    return count


def known_of(value: Any) -> Any:
    """All that a trace knows of a value but which tensor it is; the user's code asks nothing of it by this.

    Raises:
        UnknownFormError: it is more than that.
    """
    with torch._C.DisableTorchFunction():
        return form_of_value(value) if not isinstance(value, _OTHERS) else (type(value), value)
