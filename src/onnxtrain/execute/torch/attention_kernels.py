"""Attention by kernels of PyTorch, where one of them takes the operands and nobody has switched it off.

On the CPU flash attention takes all types and masks. On CUDA it takes half types without a mask, packed rows as they
are, and memory-efficient attention the rest of float32 and half types. Forward and backward have but the result and the
log of the sum of exponentials in common, which all kernels and the plain formula define alike: each chooses for itself,
and gives None where none serves.
"""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from onnxtrain.execute.torch.packed_rows import Packing

Tensor = torch.Tensor
aten = torch.ops.aten
_WIDTH = 8  # flash attention reads heads of a multiple of it
_COLUMNS = 16  # memory-efficient attention reads masks whose rows begin at multiples of it
_ROWS = 32  # and sums of a multiple of it


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """The result and the log of the sum of exponentials: (batch, heads, rows) of operands of four axes."""
    if not _could(q, k, v):
        return None
    q, k, v = dense(q, k, v)
    if not _is_cuda(q):
        made = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=_added(mask, q), scale=scale
        )
        return made[0], made[1]
    if _flash_takes(q, k, v, mask, is_causal):
        made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return made[0], made[1]
    bias = _bias(mask, q, k)
    if _efficient_takes(q, k, v, bias, is_causal):
        made = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
        return made[0], made[1].narrow(2, 0, q.shape[2])
    return None


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    log_sum_exp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv."""
    if not _could(q, k, v):
        return None
    dy, q, k, v = dense(dy, q, k, v)
    if not _is_cuda(q):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, log_sum_exp, 0.0, is_causal, attn_mask=_added(mask, q), scale=scale
        )
    if _flash_takes(q, k, v, mask, is_causal):
        sizes, drawn = (None, None, q.shape[2], k.shape[2], 0.0, is_causal), _nothing_drawn(q, torch.uint64)
        return aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, log_sum_exp.contiguous(), *sizes, *drawn, scale=scale
        )
    bias = _bias(mask, q, k)
    if _efficient_takes(q, k, v, bias, is_causal):
        rows = -log_sum_exp.shape[2] % _ROWS
        sums = torch.nn.functional.pad(log_sum_exp, (0, rows), value=float("inf"))
        wanted, drawn = [True, True, True, False], _nothing_drawn(q, torch.int64)
        made = aten._scaled_dot_product_efficient_attention_backward(
            dy, q, k, v, bias, y, sums, *drawn, 0.0, wanted, is_causal, scale=scale
        )
        return made[0], made[1], made[2]
    return None


def packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor] | None:
    """The result (rows, heads, width) and the log of the sum of exponentials (rows, heads) of packed rows."""
    q, k, v = dense(q, k, v)
    if not _flash_takes_packed(q, k, v, packing):
        return None
    y, sums, *_ = aten._flash_attention_forward(
        q, k, v, *_ends(packing), 0.0, packing.causal, return_debug_mask=False, scale=scale
    )
    return y, sums.masked_fill(sums.isinf(), 0.0).t()  # of a row without keys


def packed_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: Packing, y: Tensor, log_sum_exp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv of packed rows."""
    q, k, v = dense(q, k, v)
    if not _flash_takes_packed(q, k, v, packing):
        return None
    given = (y, log_sum_exp.t().contiguous(), *_ends(packing))
    drawn = _nothing_drawn(q, torch.uint64)
    return aten._flash_attention_backward(dy, q, k, v, *given, 0.0, packing.causal, *drawn, scale=scale)


def dense(*tensors: Tensor) -> list[Tensor]:
    """The tensors with their last axis in one piece: kernels read it so; eager takes another one where it is not."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _is_cuda(q: Tensor) -> bool:
    return q.is_cuda


def _could(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether kernels may be asked; of nothing, or of other heads, they divide by zero."""
    some = bool(q.numel() and k.numel()) and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if not some or q.dim() != 4 or not (_is_cuda(q) or q.device.type == "cpu"):
        return False
    return q.shape[-1] == k.shape[-1] == v.shape[-1]


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask with as many axes as the CPU's kernel wants, and of doubles where those are: it reads others wrongly."""
    if mask is None:
        return None
    mask = mask.to(q.dtype) if q.dtype == torch.float64 else mask
    if mask.dim() in (2, q.dim()):
        return mask
    return mask.reshape((1,) * (q.dim() - mask.dim()) + mask.shape)


def _flash_takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    if mask is not None or q.shape[-1] % _WIDTH or not q.dtype == k.dtype == v.dtype:
        return False
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, is_causal, False), False)


def _efficient_takes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool) -> bool:
    if not q.dtype == k.dtype == v.dtype:
        return False
    return can_use_efficient_attention(SDPAParams(q, k, v, bias, 0.0, is_causal, False), False)


def _flash_takes_packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> bool:
    """Whether each sequence could be taken; whether queries and keys are the same rows the host knows only of one."""
    if packing.mask is not None or (packing.causal and packing.q_rows is not packing.k_rows):
        return False
    a, b, c = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    return _is_cuda(q) and not torch.version.hip and _could(a, b, c) and _flash_takes(a, b, c, None, False)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask (batch, heads, rows, columns) in the type of the operands, its rows where the kernel reads them."""
    if mask is None:
        return None
    columns = k.shape[2]
    mask = mask.to(q.dtype).expand(*mask.shape[:-1], columns)
    beyond = -columns % _COLUMNS
    if beyond or mask.stride(-1) != 1:
        mask = torch.nn.functional.pad(mask, (0, beyond)).narrow(-1, 0, columns)
    return mask.expand(*q.shape[:3], columns)


def _ends(packing: Packing) -> tuple[Tensor, Tensor, int, int]:
    """Where sequences of queries and of keys end among packed rows, and how many rows they have at most."""
    q_ends, k_ends = (
        torch.searchsorted(rows, torch.arange(shape[0] + 1, device=rows.device) * shape[1], out_int32=True)
        for rows, shape in ((packing.q_rows, packing.q_shape), (packing.k_rows, packing.k_shape))
    )
    return q_ends, k_ends, packing.q_shape[1], packing.k_shape[1]


def _nothing_drawn(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The random state of dropout, which nothing reads where there is none."""
    return torch.zeros(2, dtype=dtype, device=q.device), torch.zeros((), dtype=dtype, device=q.device)
