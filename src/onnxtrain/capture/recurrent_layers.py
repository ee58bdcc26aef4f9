"""Recurrent layers stay whole while a module is traced.

torch runs them on shapes by unrolling: the length would become a number, and each length a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor
_SETTINGS = "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"


def _is_plain(kind: str, args: Sequence[Any]) -> bool:
    """Whether a call is neither of a packed sequence (its second argument is the batch sizes) nor with projections."""
    if len(args) != 9 or isinstance(args[2], Tensor) or isinstance(args[1], Tensor) == (kind == "lstm"):
        return False
    directions = 2 if args[7] else 1
    return len(args[2]) == args[4] * directions * (4 if args[3] else 2)


def _define(kind: str, states: int) -> None:
    returns = ", ".join(["Tensor"] * (states + 1))
    schema = f"(Tensor x, Tensor[] states, Tensor[] weights, {_SETTINGS}) -> ({returns})"

    @torch.library.custom_op(f"onnxtrain::{kind}", mutates_args=(), schema=schema)
    def layer(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
        given = tuple(states) if kind == "lstm" else states[0]
        return getattr(torch, kind)(x, given, weights, *settings)

    @layer.register_fake
    def _(
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
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
        if kwargs or not _is_plain(kind, args):
            return NotImplemented
        states = list(args[1]) if kind == "lstm" else [args[1]]
        return tuple(getattr(torch.ops.onnxtrain, kind)(args[0], states, list(args[2]), *args[3:]))


for _kind, _states in {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}.items():
    _define(_kind, _states)
