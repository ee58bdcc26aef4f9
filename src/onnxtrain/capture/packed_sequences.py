"""Packed sequences: how they are made of padded ones and back, in operators whose shapes are told.

torch reads the lengths to make one, and the largest of its batch sizes to use it. Here only the longest length is read;
how many sequences there are is kept beside the batch sizes. The elements lie in the same order: first those of the
first step, longest sequence first.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
_ROWS = "_onnxtrain_rows"  # the attribute of batch sizes


def rows_of(batch_sizes: Tensor) -> Any:
    """How many sequences there are; read out of the batch sizes where these come from elsewhere."""
    known = getattr(batch_sizes, _ROWS, None)
    return batch_sizes[0].item() if known is None else known


def are_known(batch_sizes: Tensor) -> bool:
    """Whether it is known how many sequences these batch sizes are of."""
    return hasattr(batch_sizes, _ROWS)


def pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The elements of sequences, and the batch sizes: in the place of ``torch._VF._pack_padded_sequence``.

    Args:
        input: padded sequences, (T, B, ...), or (B, T, ...) where ``batch_first``.
        lengths: int64, shape (B,), the longest first.
        batch_first: the order of axes.

    Raises:
        RuntimeError: lengths are not in this order, or not positive.
    """
    if (lengths[1:] > lengths[:-1]).any():
        raise RuntimeError("lengths must be sorted in decreasing order, or enforce_sorted=False")
    if (lengths <= 0).any():
        raise RuntimeError("the length of every sequence has to be greater than 0")
    x, longest = input.transpose(0, 1) if batch_first else input, lengths.max().item()
    inside = torch.arange(longest, device=x.device)[:, None] < lengths.to(x.device)
    batch_sizes = inside.sum(1).cpu()
    setattr(batch_sizes, _ROWS, lengths.shape[0])
    return x[:longest][inside], batch_sizes


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Padded sequences and their lengths: in the place of ``torch._VF._pad_packed_sequence``."""
    padded, lengths = unpacked(data, batch_sizes, rows_of(batch_sizes), padding_value)
    missing = total_length - batch_sizes.shape[0]
    if not isinstance(missing, int) or missing:
        padded = torch.cat([padded, padded.new_full((missing, *padded.shape[1:]), padding_value)])
    return padded.transpose(0, 1) if batch_first else padded, lengths.cpu()


def unpacked(data: Tensor, batch_sizes: Tensor, rows: Any, padding: float = 0.0) -> tuple[Tensor, Tensor]:
    """The elements as (longest, rows, ...), and the lengths."""
    inside = _inside(batch_sizes, rows, data.device)
    places = (inside.flatten().cumsum(0) - 1).clamp(min=0)
    padded = data[places].unflatten(0, inside.shape)
    shown = inside.reshape(*inside.shape, *[1] * (data.dim() - 1))
    return torch.where(shown, padded, torch.full((), padding, dtype=data.dtype, device=data.device)), inside.sum(0)


def packed_like(padded: Tensor, batch_sizes: Tensor, rows: Any, data: Tensor) -> Tensor:
    """The elements of (longest, rows, ...) in the order, and number, of those of ``data``."""
    inside = _inside(batch_sizes, rows, padded.device).flatten()
    count = data.shape[0]
    targets = torch.where(inside, inside.cumsum(0) - 1, count)
    places = torch.arange(inside.shape[0], device=padded.device)
    sources = torch.zeros(count + 1, dtype=torch.int64, device=padded.device).scatter(0, targets, places)[:count]
    return padded.flatten(0, 1)[sources]


def _inside(batch_sizes: Tensor, rows: Any, device: torch.device) -> Tensor:
    """For each step and sequence whether it is no padding."""
    return torch.arange(rows, device=device) < batch_sizes.to(device)[:, None]


def hidden_size(self: torch.nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> Any:
    """The size of a hidden state that a recurrent layer asks for."""
    return _state_size(self, self.proj_size or self.hidden_size, input, batch_sizes)


def cell_size(self: torch.nn.LSTM, input: Tensor, batch_sizes: Tensor | None) -> Any:
    """The size of a cell state that an LSTM asks for."""
    return _state_size(self, self.hidden_size, input, batch_sizes)


def _state_size(layer: torch.nn.RNNBase, width: int, input: Tensor, batch_sizes: Tensor | None) -> Any:
    rows = input.shape[0 if layer.batch_first else 1] if batch_sizes is None else rows_of(batch_sizes)
    return layer.num_layers * (2 if layer.bidirectional else 1), rows, width
