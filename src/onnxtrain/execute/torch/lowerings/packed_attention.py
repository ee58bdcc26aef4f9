"""Attention among rows without padding: on the host sequence by sequence, elsewhere as a padded batch.

Where attention weights are dropped, those of one sequence at a time exist, in memory that the next one uses again:
backward computes them once more, which costs less than keeping them. Heads are read and written where they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten
_MINUS_INFINITY = float("-inf")


@dataclasses.dataclass(frozen=True)
class _Part:
    """What belongs to one sequence.

    Args:
        rows: its queries.
        columns: its keys.
        drawn: its elements of the mask of dropout.
        shape: of its scores: (heads, rows, columns).
        addend: what is added to its scores, in a shape that broadcasts to theirs.
    """

    rows: slice
    columns: slice
    drawn: slice
    shape: tuple[int, int, int]
    addend: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Where the packed rows lie in the padded batch.

    Args:
        q_rows, k_rows: row numbers of queries and keys.
        q_shape, k_shape: (sequences, length) of queries and keys.
        mask: what is added to the scores, of rank 4; or None.
        causal: whether a query sees no key after itself.
    """

    q_rows: Tensor
    k_rows: Tensor
    q_shape: tuple[int, int]
    k_shape: tuple[int, int]
    mask: Tensor | None
    causal: bool

    @property
    def aligned(self) -> bool:
        """Whether queries and keys are the same rows."""
        return self.q_shape == self.k_shape and (self.q_rows is self.k_rows or torch.equal(self.q_rows, self.k_rows))

    @property
    def can_blind(self) -> bool:
        """Whether a query that has a key may see none."""
        mask = self.mask
        hidden = mask is not None and mask.numel() > 0 and mask.amin().item() == _MINUS_INFINITY
        return hidden or (self.causal and not self.aligned)

    def parts(self, heads: int, causal: bool) -> list[_Part]:
        """The sequences in order."""
        q_rows, k_rows = self.q_rows.numpy(), self.k_rows.numpy()
        rows, columns = _slices(q_rows, self.q_shape), _slices(k_rows, self.k_shape)
        found, count = [], 0
        for entry, (row, column) in enumerate(zip(rows, columns, strict=True)):
            shape = (heads, row.stop - row.start, column.stop - column.start)
            places = q_rows[row] - entry * self.q_shape[1], k_rows[column] - entry * self.k_shape[1]
            addend = self._addend(entry, *places, causal) if math.prod(shape) else None
            found.append(_Part(row, column, slice(count, count + math.prod(shape)), shape, addend))
            count += math.prod(shape)
        return found

    def _addend(self, entry: int, rows: np.ndarray, columns: np.ndarray, causal: bool) -> Tensor | None:
        addend = None
        if self.mask is not None:
            own = self.mask[entry if self.mask.shape[0] > 1 else 0]
            addend = _taken(_taken(own, 1, rows), 2, columns)
        if not causal:
            return addend
        late = torch.from_numpy(columns[None, :] > rows[:, None])
        dtype = torch.float32 if addend is None else addend.dtype
        unseen = torch.zeros(1, *late.shape, dtype=dtype).masked_fill_(late, _MINUS_INFINITY)
        return unseen if addend is None else addend + unseen


def _slices(rows: np.ndarray, shape: tuple[int, int]) -> list[slice]:
    """For each sequence, where its rows are."""
    ends = np.searchsorted(rows, np.arange(shape[0] + 1) * shape[1]).tolist()
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def _taken(mask: Tensor, axis: int, places: np.ndarray) -> Tensor:
    """The mask at these places of an axis, a view where they are neighbours."""
    if mask.shape[axis] == 1:
        return mask
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return mask.narrow(axis, first, len(places))
    return mask.index_select(axis, torch.from_numpy(places))


@lowering("PackedAttention", domain=DOMAIN, host=(5, 6))
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rows: Tensor,
    k_rows: Tensor,
    q_shape: Any,
    k_shape: Any,
    mask: Tensor | None = None,
    *,
    needed: Sequence[bool] = (True,),
    scale: float = 1.0,
    ratio: float = 0.0,
    causal: int = 0,
) -> Tensor | tuple[Tensor | None, ...]:
    """The result; and what backward reads: the log of the sum of exponentials, or what dropout has kept."""
    packing = _Packing(q_rows, k_rows, tuple(q_shape), tuple(k_shape), _of_rank_4(mask, q), bool(causal))
    wanted = (*needed, False, False)[1:3]
    if q.device.type != "cpu":
        made = _on_device(q, k, v, packing, scale, ratio)
    elif ratio == 0 and q.shape[-1] == v.shape[-1]:
        made = _fused(q, k, v, packing, scale, wanted[1])
    else:
        made = _by_parts(q, k, v, packing, scale, ratio, wanted)
    return made[0] if len(needed) == 1 else made[: len(needed)]


@lowering("PackedAttentionGrad", domain=DOMAIN, host=(6, 7))
def packed_attention_grad(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rows: Tensor,
    k_rows: Tensor,
    q_shape: Any,
    k_shape: Any,
    mask: Tensor | None = None,
    y: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    scale: float = 1.0,
    ratio: float = 0.0,
    causal: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    packing = _Packing(q_rows, k_rows, tuple(q_shape), tuple(k_shape), _of_rank_4(mask, q), bool(causal))
    if q.device.type != "cpu":
        return _on_device_backward(dy, q, k, v, packing, scale, ratio, kept)
    if ratio == 0 and q.shape[-1] == v.shape[-1] and y is not None and log_sum_exp is not None:
        return _fused_backward(dy, q, k, v, packing, y, log_sum_exp, scale)
    return _by_parts_backward(dy, q, k, v, packing, scale, ratio, kept)


def _of_rank_4(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(q.dtype).reshape((1,) * (4 - mask.dim()) + mask.shape)


def draw(count: int, ratio: float) -> Tensor:
    """A flat mask (count) that is true with probability ``1 - ratio``, by torch's generator of the host.

    Of a random byte, ``byte < n`` is true with probability n / 256. What is missing to the exact probability comes from
    a few places made true beside, whose distances are geometrically distributed. One draw of eight bytes serves eight
    elements: several times as fast as one of ``bernoulli_`` for each.
    """
    level = (1.0 - ratio) * 256
    whole = int(level)
    numbers = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.uint8)[:count].lt_(whole) if whole < 256 else numbers.view(torch.uint8)[:count].fill_(1)
    if level > whole and count:
        kept.index_fill_(0, _places(count, (level - whole) / (256 - whole)), 1)
    return kept.view(torch.bool)


def _places(count: int, chance: float) -> Tensor:
    """Each of ``range(count)`` with that chance, independently: ascending."""
    expected = count * chance
    enough = int(expected + 6 * math.sqrt(expected) + 8)
    at = torch.empty(enough, dtype=torch.int64).geometric_(chance).cumsum(0)
    while int(at[-1]) <= count:
        more = torch.empty(enough, dtype=torch.int64).geometric_(chance).cumsum(0)
        at = torch.cat((at, more + at[-1]))
    return at[at <= count] - 1


def _heads_first(x: Tensor, part: slice) -> Tensor:
    """(heads, rows, width) of some rows."""
    return x[part].transpose(0, 1)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, packing: _Packing, scale: float, all_kept: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Flash attention of each sequence."""
    by_order = packing.causal and packing.mask is None and packing.aligned
    parts = packing.parts(q.shape[1], packing.causal and not by_order)
    y, log_sum_exp = (
        torch.empty(q.shape, dtype=q.dtype),
        torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    for part in parts:
        if not math.prod(part.shape) or not q.shape[-1]:
            y[part.rows], log_sum_exp[part.rows] = 0.0, 0.0
            continue
        heads = (
            _heads_first(q, part.rows)[None],
            _heads_first(k, part.columns)[None],
            _heads_first(v, part.columns)[None],
        )
        made = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, by_order, attn_mask=_addend_of(part, q), scale=scale
        )
        y[part.rows] = made[0][0].transpose(0, 1)
        log_sum_exp[part.rows] = made[1][0].t()
    count = parts[-1].drawn.stop if parts else 0
    return y, log_sum_exp, torch.ones(count, dtype=torch.bool) if all_kept else None


def _addend_of(part: _Part, q: Tensor) -> Tensor | None:
    return None if part.addend is None else part.addend[None].to(q.dtype)


def _fused_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: _Packing, y: Tensor, log_sum_exp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    by_order = packing.causal and packing.mask is None and packing.aligned
    dq, dk, dv = (
        torch.empty(q.shape, dtype=q.dtype),
        torch.empty(k.shape, dtype=q.dtype),
        torch.empty(v.shape, dtype=q.dtype),
    )
    for part in packing.parts(q.shape[1], packing.causal and not by_order):
        if not math.prod(part.shape) or not q.shape[-1]:
            dq[part.rows], dk[part.columns], dv[part.columns] = 0.0, 0.0, 0.0
            continue
        g, a, made = (_heads_first(t, part.rows)[None] for t in (dy, q, y))
        b, c = (_heads_first(t, part.columns)[None] for t in (k, v))
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g,
            a,
            b,
            c,
            made,
            log_sum_exp[part.rows].t()[None],
            0.0,
            by_order,
            attn_mask=_addend_of(part, q),
            scale=scale,
        )
        for whole, at, one in zip((dq, dk, dv), (part.rows, part.columns, part.columns), found, strict=True):
            whole[at] = one[0].transpose(0, 1)
    return dq, dk, dv


class _Weights:
    """Attention weights of one sequence after the other, in the same memory.

    Args:
        parts: the sequences.
        packing: where they lie.
        dtype: element type of the computation.
        blocks: how many blocks of the size of the scores are needed at a time.
    """

    def __init__(self, parts: Sequence[_Part], packing: _Packing, dtype: torch.dtype, blocks: int) -> None:
        largest = max((math.prod(p.shape) for p in parts), default=0)
        self._memory = [torch.empty(largest, dtype=dtype) for _ in range(blocks)]
        self._guarded = packing.can_blind

    def block(self, index: int, part: _Part) -> Tensor:
        """Memory of the shape of the part's scores; the first two hold scores and weights."""
        return self._memory[index][: math.prod(part.shape)].view(part.shape)

    def of(self, part: _Part, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """The weights (heads, rows, columns), in block 1; the scores are in block 0 until it is written again."""
        scores, weights = self.block(0, part), self.block(1, part)
        if part.addend is None:
            torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
        else:
            torch.baddbmm(part.addend.to(q.dtype), q, k.mT, alpha=scale, out=scores)
        torch.softmax(scores, -1, out=weights)
        if self._guarded:
            weights.masked_fill_(scores.amax(-1, keepdim=True) == _MINUS_INFINITY, 0.0)
        return weights


def _by_parts(
    q: Tensor, k: Tensor, v: Tensor, packing: _Packing, scale: float, ratio: float, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Matrix products and softmax of each sequence; half types are computed in float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    a, b, c = (t.to(dtype) for t in (q, k, v))
    parts = packing.parts(q.shape[1], packing.causal)
    weights = _Weights(parts, packing, dtype, 2)
    kept = draw(parts[-1].drawn.stop if parts else 0, ratio) if ratio else None
    log_sum_exp = torch.zeros(q.shape[:2], dtype=dtype) if wanted[0] else None
    y = torch.empty((*q.shape[:2], v.shape[-1]), dtype=dtype)
    for part in parts:
        if not math.prod(part.shape):
            y[part.rows] = 0.0
            continue
        w = weights.of(part, _heads_first(a, part.rows), _heads_first(b, part.columns), scale)
        if log_sum_exp is not None:
            log_sum_exp[part.rows] = torch.logsumexp(weights.block(0, part), -1).t()
        if kept is not None:
            w.mul_(kept[part.drawn].view(torch.uint8).view(part.shape))
        _heads_first(y, part.rows).copy_(_product(w, _heads_first(c, part.columns), _factor(ratio)))
    if kept is None and wanted[1]:
        kept = torch.ones(parts[-1].drawn.stop if parts else 0, dtype=torch.bool)
    return y.to(q.dtype), log_sum_exp, kept


def _product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """``factor * a @ b``."""
    if factor == 1.0:
        return torch.bmm(a, b)
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=factor)


def _factor(ratio: float) -> float:
    """By what weights that are kept are multiplied."""
    return 0.0 if ratio == 1.0 else 1.0 / (1.0 - ratio)


def _by_parts_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: _Packing, scale: float, ratio: float, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """With weights W, kept K and dW = K / (1 - ratio) * (dy @ vᵀ): dscores = W * (dW - Σ W * dW)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    g, a, b, c = (t.to(dtype) for t in (dy, q, k, v))
    parts = packing.parts(q.shape[1], packing.causal)
    weights = _Weights(parts, packing, dtype, 3)
    dq, dk, dv = (torch.empty(t.shape, dtype=dtype) for t in (q, k, v))
    for part in parts:
        if not math.prod(part.shape):
            dq[part.rows], dk[part.columns], dv[part.columns] = 0.0, 0.0, 0.0
            continue
        left = [_heads_first(t, part.rows) for t in (g, a, dq)]
        right = [_heads_first(t, part.columns) for t in (b, c, dk, dv)]
        w = weights.of(part, left[1], right[0], scale)
        dw, used = weights.block(0, part), w
        torch.bmm(left[0], right[1].mT, out=dw)
        if kept is not None:
            drawn = kept[part.drawn].view(torch.uint8).view(part.shape)
            dw.mul_(drawn)
            used = torch.mul(w, drawn, out=weights.block(2, part))
        right[3].copy_(_product(used.mT, left[0], _factor(ratio)))
        dscores = aten._softmax_backward_data.out(dw, w, -1, dtype, grad_input=weights.block(2, part))
        left[2].copy_(_product(dscores, right[0], scale * _factor(ratio)))
        right[2].copy_(_product(dscores.mT, left[1], scale * _factor(ratio)))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class _Padded:
    """The packed rows as a padded batch, and which of its scores exist."""

    def __init__(self, packing: _Packing) -> None:
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
        scores = scores.masked_fill(~seen, _MINUS_INFINITY)
        blind = scores.amax(-1, keepdim=True) == _MINUS_INFINITY
        sums = torch.logsumexp(scores, -1, keepdim=True).masked_fill(blind, 0.0)
        weights = torch.exp(scores - sums)
        return weights, sums.squeeze(-1).transpose(1, 2).flatten(0, 1)[self.packing.q_rows]

    def dropped(self, kept: Tensor, heads: int) -> Tensor:
        """The flat mask of dropout as one of all scores."""
        there = self._all(heads)
        return torch.zeros_like(there).masked_scatter_(there, kept)

    def chosen(self, mask: Tensor) -> Tensor:
        """The mask of dropout of all scores as a flat one of those that exist."""
        return mask.masked_select(self._all(mask.shape[1]))

    def _all(self, heads: int) -> Tensor:
        return self.there.expand(-1, heads, -1, -1)

    def packed(self, x: Tensor, rows: Tensor) -> Tensor:
        """Packed rows (rows, heads, width) of a padded batch."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, rows)


def _on_device(
    q: Tensor, k: Tensor, v: Tensor, packing: _Packing, scale: float, ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One padded batch: a device would wait for the host between sequences."""
    batch = _Padded(packing)
    weights, sums = batch.weights(batch.queries(q), batch.keys(k), scale)
    mask = torch.empty_like(weights, dtype=torch.bool).bernoulli_(1.0 - ratio)
    weights = (weights * mask * _factor(ratio)).to(q.dtype)
    y = torch.matmul(weights, batch.keys(v))
    return batch.packed(y, packing.q_rows), sums, batch.chosen(mask)


def _on_device_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: _Packing, scale: float, ratio: float, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch = _Padded(packing)
    g, a, b, c = batch.queries(dy), batch.queries(q), batch.keys(k), batch.keys(v)
    weights, _ = batch.weights(a, b, scale)
    factor = 1.0 if kept is None else batch.dropped(kept, q.shape[1]).to(weights.dtype) * _factor(ratio)
    dweights = torch.matmul(g, c.mT) * factor
    dscores = (weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale).to(q.dtype)
    dv = torch.matmul((weights * factor).to(q.dtype).mT, g)
    dq, dk = torch.matmul(dscores, b), torch.matmul(dscores.mT, a)
    return batch.packed(dq, packing.q_rows), batch.packed(dk, packing.k_rows), batch.packed(dv, packing.k_rows)
