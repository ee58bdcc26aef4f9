"""Which rows others depend on, through any number of attentions."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("ReachableRows", domain=DOMAIN)
def reachable_rows(start: Tensor, seen: Tensor) -> Tensor:
    """Steps along the edges until nothing is added; masks of training need two."""
    edges, rows, count = seen.to(torch.float32), start, -1
    while count != (now := int(rows.sum())):
        count = now
        rows = rows | (torch.bmm(rows.to(torch.float32).unsqueeze(1), edges).squeeze(1) > 0)
    return rows
