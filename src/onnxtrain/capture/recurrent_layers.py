"""Recurrent layers stay whole while a module is traced.

torch runs them on shapes by unrolling: the length would become a number, and each length a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.capture.packed_sequences import packed_like, unpacked
from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor
_SETTINGS = "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"


def _is_plain(kind: str, args: Sequence[Any]) -> bool:
    """Whether a call is neither of a packed sequence (its second argument is the batch sizes) nor with projections."""
    if len(args) != 9 or isinstance(args[2], Tensor) or isinstance(args[1], Tensor) == (kind == "lstm"):
        return False
    return not _has_projections(args[2], args[3], args[4], args[7])


def _is_packed(kind: str, args: Sequence[Any]) -> bool:
    """Whether a call is one of a packed sequence, without projections."""
    if len(args) != 9 or not isinstance(args[1], Tensor) or isinstance(args[2], Tensor) == (kind == "lstm"):
        return False
    return not isinstance(args[3], Tensor | bool) and not _has_projections(args[3], args[4], args[5], args[8])


def _has_projections(weights: Sequence[Tensor], has_biases: bool, layers: int, bidirectional: bool) -> bool:
    return len(weights) != layers * (2 if bidirectional else 1) * (4 if has_biases else 2)


def _define(kind: str, states: int) -> None:
    returns = ", ".join(["Tensor"] * (states + 1))
    schema = f"(Tensor x, Tensor[] states, Tensor[] weights, Tensor? lengths, {_SETTINGS}) -> ({returns})"

    @torch.library.custom_op(f"onnxtrain::{kind}", mutates_args=(), schema=schema)
    def layer(
        x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], lengths: Tensor | None, *settings: Any
    ) -> tuple[Tensor, ...]:
        raise RuntimeError(f"onnxtrain::{kind} stands for a layer while a module is traced; it does not run")

    @layer.register_fake
    def _(
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        lengths: Tensor | None,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        width = states[0].shape[-1] * (2 if bidirectional else 1)
        return x.new_empty(*x.shape[:-1], width), *(torch.empty_like(s) for s in states)

    @substitute(getattr(torch, kind))
    def whole(*args: Any, **kwargs: Any) -> Any:
        """The operator of ours, which knows its shapes."""
        own = getattr(torch.ops.onnxtrain, kind)
        if not kwargs and _is_plain(kind, args):
            return tuple(own(args[0], _states(args[1]), list(args[2]), None, *args[3:]))
        if kwargs or not _is_packed(kind, args):
            return NotImplemented
        data, sizes, states = args[0], args[1], _states(args[2])
        rows = states[0].shape[1]
        x, lengths = unpacked(data, sizes, rows)
        y, *ends = own(x, states, list(args[3]), lengths, *args[4:], False)
        return packed_like(y, sizes, rows, data), *ends


def _states(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


for _kind, _count in {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}.items():
    _define(_kind, _count)
