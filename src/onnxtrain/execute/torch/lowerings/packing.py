"""Rows without padding: taken out of a padded tensor, put back into one."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.execute.torch.lowerings.random import drawn_mask
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("ShrunkenGather", domain=DOMAIN)
def shrunken_gather(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x."""
    return torch.index_select(x, 0, indices)


@lowering("ShrunkenGatherGrad", domain=DOMAIN, host=(2,))
def shrunken_gather_grad(dy: Tensor, indices: Tensor, shape: Any) -> Tensor:
    """Rows of dy placed in zeros."""
    return torch.zeros(shape, dtype=dy.dtype, device=dy.device).index_copy_(0, indices, dy)


@lowering("PackedDropout", domain=DOMAIN, host=(1,))
def packed_dropout(x: Tensor, ratio: float, *, outputs: int = 1) -> tuple[Tensor, Tensor] | Tensor:
    """Numbers drawn eight at a time on the host, as torch draws them elsewhere."""
    if x.device.type != "cpu" or not 0.0 < ratio < 1.0:
        y, mask = torch.native_dropout(x, ratio, True)
    else:
        mask = drawn_mask(x.numel(), ratio).view(x.shape)
        y = torch.ops.aten.native_dropout_backward(x, mask, 1.0 / (1.0 - ratio))
    return y if outputs == 1 else (y, mask)


@lowering("FlattenAndUnpad", domain=DOMAIN)
def flatten_and_unpad(x: Tensor, rows: Tensor, *, outputs: int = 1) -> Tensor | tuple[Tensor, Tensor]:
    """Rows of the flattened x; a copy of x is made only where its first two axes are not one in memory."""
    y = torch.index_select(x.flatten(0, 1), 0, rows)
    return y if outputs == 1 else (y, torch.tensor(x.shape[:2], device=x.device))


@lowering("PadAndUnflatten", domain=DOMAIN, host=(2,))
def pad_and_unflatten(x: Tensor, rows: Tensor, shape: Any) -> Tensor:
    """Rows of x placed in zeros."""
    batch, length = shape
    flat = torch.zeros((batch * length, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return flat.index_copy_(0, rows, x).view((batch, length, *x.shape[1:]))
