"""Which rows others depend on, through any number of attentions."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
_STEPS = 4  # each reads all edges


@lowering("ReachableRows", domain=DOMAIN)
def reachable_rows(start: Tensor, seen: Tensor) -> Tensor:
    """Steps along the edges until nothing is added; masks of training need two.

    Elsewhere than on a CPU nobody asks after each step: where a few do not suffice, all rows count as reached.
    """
    edges, rows = seen.to(torch.float32), start
    if start.device.type != "cpu":
        for _ in range(_STEPS):
            before, rows = rows, _step(rows, edges)
        return rows | (rows != before).any()
    count = -1
    while count != (now := int(rows.sum())):
        count, rows = now, _step(rows, edges)
    return rows


def _step(rows: Tensor, edges: Tensor) -> Tensor:
    """The rows, and those that they see."""
    return rows | (torch.bmm(rows.to(torch.float32).unsqueeze(1), edges).squeeze(1) > 0)
