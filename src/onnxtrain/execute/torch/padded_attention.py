"""Attention among packed rows as one padded batch: a device would wait for the host between sequences."""

from __future__ import annotations

import math

import torch

from onnxtrain.execute.torch.packed_rows import MINUS_INFINITY, Packing, scale_of_kept

Tensor = torch.Tensor


class _Padded:
    """The packed rows as a padded batch, and which of its scores exist."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        rows, columns = (
            self._flat(torch.ones_like(at, dtype=torch.bool), at, shape)
            for at, shape in ((packing.q_rows, packing.q_shape), (packing.k_rows, packing.k_shape))
        )
        self.there = rows[:, None, :, None] & columns[:, None, None, :]

    @staticmethod
    def _flat(x: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        flat = x.new_zeros((math.prod(shape), *x.shape[1:])).index_copy_(0, rows, x)
        return flat.view(*shape, *x.shape[1:])

    def queries(self, x: Tensor) -> Tensor:
        """(sequences, heads, length, width) of packed queries."""
        return self._flat(x, self.packing.q_rows, self.packing.q_shape).transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        """(sequences, heads, length, width) of packed keys or values."""
        return self._flat(x, self.packing.k_rows, self.packing.k_shape).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The weights, 0 in a row that sees nothing; and the log of the sum of exponentials of each packed row."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q * scale, k.mT).to(dtype)
        if self.packing.mask is not None:
            scores = scores + self.packing.mask
        seen = self.there.tril() if self.packing.causal else self.there
        scores = scores.masked_fill(~seen, MINUS_INFINITY)
        blind = scores.amax(-1, keepdim=True) == MINUS_INFINITY
        sums = torch.logsumexp(scores, -1, keepdim=True).masked_fill(blind, 0.0)
        weights = torch.exp(scores - sums)
        return weights, sums.squeeze(-1).transpose(1, 2).flatten(0, 1)[self.packing.q_rows]

    def packed(self, x: Tensor, rows: Tensor) -> Tensor:
        """Packed rows (rows, heads, width) of a padded batch."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, rows)


def forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, ratio: float, all_kept: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result, the log of the sum of exponentials and, flat, what dropout has kept.

    That is a mask of all scores of the batch: how many there are without padding only the device knows. Without dropout
    there is none, unless one that has kept all is wanted.
    """
    batch = _Padded(packing)
    weights, sums = batch.weights(batch.queries(q), batch.keys(k), scale)
    kept = None
    if ratio or all_kept:
        kept = torch.empty_like(weights, dtype=torch.bool).bernoulli_(1.0 - ratio)
        weights = weights * kept * scale_of_kept(ratio)
    y = torch.matmul(weights.to(q.dtype), batch.keys(v))
    return batch.packed(y, packing.q_rows), sums, None if kept is None else kept.flatten()


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, ratio: float, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    batch = _Padded(packing)
    g, a, b, c = batch.queries(dy), batch.queries(q), batch.keys(k), batch.keys(v)
    weights, _ = batch.weights(a, b, scale)
    factor = 1.0 if kept is None else kept.view(weights.shape).to(weights.dtype) * scale_of_kept(ratio)
    dweights = torch.matmul(g, c.mT) * factor
    dscores = (weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale).to(q.dtype)
    dv = torch.matmul((weights * factor).to(q.dtype).mT, g)
    dq, dk = torch.matmul(dscores, b), torch.matmul(dscores.mT, a)
    return batch.packed(dq, packing.q_rows), batch.packed(dk, packing.k_rows), batch.packed(dv, packing.k_rows)
