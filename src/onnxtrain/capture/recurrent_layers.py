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


def _parts(args: Sequence[Any]) -> tuple[Tensor | None, list[Tensor], list[Tensor], list[Any]] | None:
    """The batch sizes of a packed sequence (None of a padded one), states, weights, settings; None with projections."""
    is_packed = not isinstance(args[3], bool)
    states, weights, *settings = args[2:] if is_packed else args[1:]
    has_biases, layers, *_, bidirectional = settings if is_packed else settings[:-1]
    if len(weights) != layers * (2 if bidirectional else 1) * (4 if has_biases else 2):
        return None
    return (
        args[1] if is_packed else None,
        [states] if isinstance(states, Tensor) else list(states),
        list(weights),
        settings,
    )


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
        first, second, width = *x.shape[:2], states[0].shape[-1] * (2 if bidirectional else 1)
        strides = (width, first * width, 1) if batch_first else (second * width, width, 1)  # steps lie before rows
        return x.new_empty_strided((first, second, width), strides), *(torch.empty_like(s) for s in states)

    @substitute(getattr(torch, kind))
    def whole(*args: Any, **kwargs: Any) -> Any:
        """The operator of ours, which knows its shapes."""
        parts = None if kwargs or len(args) != 9 else _parts(args)
        if parts is None:
            return NotImplemented
        (sizes, states, weights, settings), own = parts, getattr(torch.ops.onnxtrain, kind)
        if sizes is None:
            return tuple(own(args[0], states, weights, None, *settings))
        rows = states[0].shape[1]
        x, lengths = unpacked(args[0], sizes, rows)
        y, *ends = own(x, states, weights, lengths, *settings, False)
        return packed_like(y, sizes, rows, args[0]), *ends


for _kind, _count in {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}.items():
    _define(_kind, _count)
