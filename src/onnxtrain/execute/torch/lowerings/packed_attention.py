"""Attention among rows without padding: on the host sequence by sequence, elsewhere by one kernel or padded again.

Where attention weights are dropped, those of one sequence at a time exist, in memory that the next one uses again:
backward computes them once more, which costs less than keeping them. Heads are read and written where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onnxtrain.execute.torch import attention_kernels, padded_attention
from onnxtrain.execute.torch.attention_kernels import dense
from onnxtrain.execute.torch.lowerings.random import drawn_mask
from onnxtrain.execute.torch.packed_rows import MINUS_INFINITY, Packing, Part, scale_of_kept
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten


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
    packing = _packing(q, q_rows, k_rows, q_shape, k_shape, mask, causal)
    wanted = (*needed, False, False)[1:3]
    if q.device.type != "cpu":
        made = _on_device(q, k, v, packing, scale, ratio, wanted[1])
    elif ratio == 0 and q.shape[-1] == v.shape[-1] > 0:
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
    packing = _packing(q, q_rows, k_rows, q_shape, k_shape, mask, causal)
    if q.device.type != "cpu":
        if ratio == 0 and y is not None and log_sum_exp is not None:
            found = attention_kernels.packed_backward(dy, q, k, v, packing, y, log_sum_exp, scale)
            if found is not None:
                return found
        return padded_attention.backward(dy, q, k, v, packing, scale, ratio, kept)
    if ratio == 0 and q.shape[-1] == v.shape[-1] > 0 and y is not None and log_sum_exp is not None:
        return _fused_backward(dy, q, k, v, packing, y, log_sum_exp, scale)
    return _by_parts_backward(dy, q, k, v, packing, scale, ratio, kept)


def _packing(
    q: Tensor, q_rows: Tensor, k_rows: Tensor, q_shape: Any, k_shape: Any, mask: Tensor | None, causal: int
) -> Packing:
    """Where rows lie; the mask has four axes and a type that the kernels add to scores: float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if mask is not None:
        mask = mask.to(dtype).reshape((1,) * (4 - mask.dim()) + mask.shape)
    is_told = isinstance(q, FakeTensor)
    return Packing(q_rows, k_rows, tuple(q_shape), tuple(k_shape), mask, bool(causal), dtype, is_told)


def _on_device(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, ratio: float, all_kept: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """By one kernel where nothing is dropped and one takes the rows; else as a padded batch."""
    if ratio == 0 and not all_kept and (found := attention_kernels.packed_forward(q, k, v, packing, scale)) is not None:
        return *found, None
    return padded_attention.forward(q, k, v, packing, scale, ratio, all_kept)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, all_kept: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Flash attention of each sequence."""
    q, k, v = dense(q, k, v)
    y = torch.empty(q.shape, dtype=q.dtype)
    log_sum_exp = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    by_order, parts = _parts_in_order(q, packing)
    for part in parts:
        if part.empty:
            y[part.rows], log_sum_exp[part.rows] = 0.0, 0.0
            continue
        heads = (part.queries(q)[None], part.keys(k)[None], part.keys(v)[None])
        made = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, by_order, attn_mask=_addend_of(part), scale=scale
        )
        y[part.rows] = made[0][0].transpose(0, 1)
        log_sum_exp[part.rows] = made[1][0].t()
        del made  # before the next one is made
    return y, log_sum_exp, _all(packing, q) if all_kept else None


def _parts_in_order(q: Tensor, packing: Packing) -> tuple[bool, list[Part]]:
    """Whether the kernel is to hide what is later, which it knows only by order; the sequences."""
    by_order = packing.causal and packing.mask is None and packing.aligned
    return by_order, packing.parts(q.shape[1], packing.causal and not by_order)


def _addend_of(part: Part) -> Tensor | None:
    addend = part.addend()
    return None if addend is None else addend[None]


def _all(packing: Packing, q: Tensor) -> Tensor:
    return torch.ones(packing.count(q.shape[1]), dtype=torch.bool)


def _fused_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: Packing, y: Tensor, log_sum_exp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dy, q, k, v = dense(dy, q, k, v)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
    by_order, parts = _parts_in_order(q, packing)
    for part in parts:
        if part.empty:
            dq[part.rows], dk[part.columns], dv[part.columns] = 0.0, 0.0, 0.0
            continue
        g, a, made = (part.queries(t)[None] for t in (dy, q, y))
        b, c = part.keys(k)[None], part.keys(v)[None]
        sums = log_sum_exp[part.rows].t()[None]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, a, b, c, made, sums, 0.0, by_order, attn_mask=_addend_of(part), scale=scale
        )
        for whole, at, one in zip((dq, dk, dv), (part.rows, part.columns, part.columns), found, strict=True):
            whole[at] = one[0].transpose(0, 1)
        del found, one  # before the next ones are made
    return dq, dk, dv


class _Weights:
    """Attention weights of one sequence after the other, in the same memory.

    Args:
        parts: the sequences, or groups of their heads.
        packing: where they lie.
        dtype: element type of the computation.
        widest: the largest width of a head.
        blocks: how many blocks of the size of the scores are needed at a time.
    """

    def __init__(self, parts: Sequence[Part], packing: Packing, dtype: torch.dtype, widest: int, blocks: int) -> None:
        largest = max((math.prod(p.shape) for p in parts), default=0)
        longest = max((p.shape[0] * max(p.shape[1:]) for p in parts), default=0)
        self._memory = [torch.empty(largest, dtype=dtype) for _ in range(blocks)]
        self._product = torch.empty(longest * widest, dtype=dtype)
        self._guarded = packing.can_blind

    def block(self, index: int, part: Part) -> Tensor:
        """Memory of the shape of the part's scores; the first two hold scores and weights."""
        return self._memory[index][: math.prod(part.shape)].view(part.shape)

    def of(self, part: Part, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """The weights (heads, rows, columns), in block 1; the scores are in block 0 until it is written again."""
        scores, weights = self.block(0, part), self.block(1, part)
        addend = part.addend()
        if addend is None:
            torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
        else:
            torch.baddbmm(addend.to(q.dtype), q, k.mT, alpha=scale, out=scores)
        torch.softmax(scores, -1, out=weights)
        if self._guarded:
            weights.masked_fill_(scores.amax(-1, keepdim=True) == MINUS_INFINITY, 0.0)
        return weights

    def multiply(self, a: Tensor, b: Tensor, factor: float, out: Tensor) -> None:
        """``out = factor * a @ b``: whole in memory first, which is faster than where heads are far from each other."""
        made = self._product[: out.numel()].view(out.shape)
        out.copy_(torch.baddbmm(made, a, b, beta=0, alpha=factor, out=made))


def _by_parts(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, ratio: float, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Matrix products and softmax of each sequence; half types are computed in float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    a, b, c = (t.to(dtype) for t in (q, k, v))
    parts = [piece for part in packing.parts(q.shape[1], packing.causal) for piece in part.pieces()]
    weights = _Weights(parts, packing, dtype, v.shape[-1], 2)
    kept = drawn_mask(packing.count(q.shape[1]), ratio) if ratio else None
    log_sum_exp = torch.zeros(q.shape[:2], dtype=dtype) if wanted[0] else None
    y = torch.empty((*q.shape[:2], v.shape[-1]), dtype=dtype)
    for part in parts:
        if part.empty:
            y[part.rows, part.heads] = 0.0
            continue
        w = weights.of(part, part.queries(a), part.keys(b), scale)
        if log_sum_exp is not None:
            log_sum_exp[part.rows, part.heads] = torch.logsumexp(weights.block(0, part), -1).t()
        if kept is not None:
            w.mul_(kept[part.drawn].view(torch.uint8).view(part.shape))
        weights.multiply(w, part.keys(c), scale_of_kept(ratio), part.queries(y))
    if kept is None and wanted[1]:
        kept = _all(packing, q)
    return y.to(q.dtype), log_sum_exp, kept


def _by_parts_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, ratio: float, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """With weights W, kept K and dW = K / (1 - ratio) * (dy @ vᵀ): dscores = W * (dW - Σ W * dW)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    g, a, b, c = (t.to(dtype) for t in (dy, q, k, v))
    parts = [piece for part in packing.parts(q.shape[1], packing.causal) for piece in part.pieces()]
    weights = _Weights(parts, packing, dtype, max(q.shape[-1], v.shape[-1]), 3)
    dq, dk, dv = (torch.empty(t.shape, dtype=dtype) for t in (q, k, v))
    factor = scale_of_kept(ratio)
    for part in parts:
        if part.empty:
            for whole, at in ((dq, part.rows), (dk, part.columns), (dv, part.columns)):
                whole[at, part.heads] = 0.0
            continue
        own_dy, own_q, own_k = part.queries(g), part.queries(a), part.keys(b)
        used = w = weights.of(part, own_q, own_k, scale)
        dw = torch.bmm(own_dy, part.keys(c).mT, out=weights.block(0, part))
        if kept is not None:
            drawn = kept[part.drawn].view(torch.uint8).view(part.shape)
            dw.mul_(drawn)
            used = torch.mul(w, drawn, out=weights.block(2, part))
        weights.multiply(used.mT, own_dy, factor, part.keys(dv))
        dscores = aten._softmax_backward_data.out(dw, w, -1, dtype, grad_input=weights.block(2, part))
        weights.multiply(dscores, own_k, scale * factor, part.queries(dq))
        weights.multiply(dscores.mT, own_q, scale * factor, part.keys(dk))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
