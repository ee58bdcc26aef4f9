"""Hooks of autograd's own nodes, and of what it saves, within a forward pass: the nodes of a trace never run.

A graph calls hooks of tensors (``gradient_hooks``); the others would be dropped without a word, and are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

from onnxtrain.capture.source_lines import is_asked_by_user, is_ours_or_torchs
from onnxtrain.capture.substitutes import instead_of, substitute
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_ENTER = graph.saved_tensors_hooks.__enter__
_CURE = "register it for the tensor, h.register_hook(...), which is part of the graph"


class _Shown:
    """A node of autograd as the user's code sees it: it takes no hooks.

    Args:
        node: it.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise CaptureError("the forward pass registers a hook of a node of autograd", cure=_CURE)
        if name == "next_functions":
            return tuple((None if n is None else _Shown(n), index) for n, index in self._node.next_functions)
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node == (other._node if type(other) is _Shown else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)


@substitute(_GRAD_FN)
def grad_fn(self: Tensor) -> Any:
    """For the user's code a node that takes no hooks."""
    if not is_asked_by_user(sys._getframe(1)) or (node := _GRAD_FN(self)) is None:
        return NotImplemented
    return _Shown(node)


@substitute(Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(self: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Refused: the parameter that a trace has is not the one that gets a gradient.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "the forward pass registers a hook of a gradient that was added up", cure="register it outside of forward, once"
    )


@instead_of(graph.saved_tensors_hooks, "__enter__")
def enter(self: graph.saved_tensors_hooks) -> None:
    """Those of torch, which keep tensors elsewhere, change nothing that is computed; others may.

    Raises:
        CaptureError: they are others.
    """
    codes = [getattr(hook, "__code__", None) for hook in (self.pack_hook, self.unpack_hook)]
    if all(code is not None and is_ours_or_torchs(code.co_filename) for code in codes):
        return _ENTER(self)
    raise CaptureError(
        "the forward pass has hooks of what autograd saves (torch.autograd.graph.saved_tensors_hooks), which a graph "
        "does not call",
        cure="leave them out: memory is saved by Options(memory_budget=...), another gradient is a "
        "torch.autograd.Function, or h.register_hook(...)",
    )


__all__ = ["enter", "grad_fn", "register_post_accumulate_grad_hook"]
