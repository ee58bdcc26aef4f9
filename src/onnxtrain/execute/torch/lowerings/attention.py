"""Attention in one kernel each way, the plain formula where none applies."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch import attention_kernels
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("ScaledDotProductAttention", domain=DOMAIN)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, outputs: int = 1, scale: float = 1.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Every row sees every column."""
    made = _forward(q, k, v, None, False, scale)
    return made[0] if outputs == 1 else made


@lowering("CausalScaledDotProductAttention", domain=DOMAIN)
def causal(q: Tensor, k: Tensor, v: Tensor, *, outputs: int = 1, scale: float = 1.0) -> Tensor | tuple[Tensor, Tensor]:
    """A row sees no column after itself."""
    made = _forward(q, k, v, None, True, scale)
    return made[0] if outputs == 1 else made


@lowering("MaskedScaledDotProductAttention", domain=DOMAIN)
def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, outputs: int = 1, scale: float = 1.0
) -> Tensor | tuple[Tensor, Tensor]:
    """A mask is added to the scores."""
    made = _forward(q, k, v, mask, False, scale)
    return made[0] if outputs == 1 else made


@lowering("ScaledDotProductAttentionGrad", domain=DOMAIN)
def attention_grad(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum_exp: Tensor, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    return _backward(dy, q, k, v, None, y, log_sum_exp, False, scale)


@lowering("CausalScaledDotProductAttentionGrad", domain=DOMAIN)
def causal_grad(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum_exp: Tensor, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    return _backward(dy, q, k, v, None, y, log_sum_exp, True, scale)


@lowering("MaskedScaledDotProductAttentionGrad", domain=DOMAIN)
def masked_grad(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, y: Tensor, log_sum_exp: Tensor, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    return _backward(dy, q, k, v, mask, y, log_sum_exp, False, scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if (found := attention_kernels.forward(q, k, v, mask, is_causal, scale)) is not None:
        return found
    scores = _scores(q, k, mask, is_causal, scale)
    log_sum_exp = torch.logsumexp(scores, -1)
    weights = torch.nan_to_num(torch.exp(scores - log_sum_exp.unsqueeze(-1)), nan=0.0)
    return torch.matmul(weights.to(v.dtype), v), log_sum_exp


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = torch.matmul(q * scale, k.transpose(-2, -1)).float() if q.itemsize == 2 else torch.matmul(q * scale, k.mT)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores if mask is None or not scores.numel() else scores + mask  # of nothing eager asks no mask to fit


def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if (found := attention_kernels.backward(dy, q, k, v, mask, y, lse, is_causal, scale)) is not None:
        return found
    weights = torch.exp(_scores(q, k, mask, is_causal, scale) - lse.unsqueeze(-1))
    weights = torch.nan_to_num(weights, nan=0.0).to(q.dtype)
    dv = torch.matmul(weights.mT, dy)
    dweights = torch.matmul(dy, v.mT)
    dscores = weights * (dweights - (dy * y).sum(-1, keepdim=True)) * scale
    return torch.matmul(dscores, k), torch.matmul(dscores.mT, q), dv
