"""Which rows others depend on, through any number of attentions."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
_STEPS = 4  # each reads all edges


@lowering("ReachableRows", domain=DOMAIN)
def reachable_rows(start: Tensor, seen: Tensor) -> Tensor:
    """Steps along the edges until nothing is added; elsewhere than on a CPU nobody asks after each step."""
    edges, rows, count = seen.to(torch.float32), start, -1
    if start.device.type != "cpu":
        return _in_few_steps(start, edges)
    while count != (now := int(rows.sum())):
        count, rows = now, _step(rows, edges)
    return rows


def _in_few_steps(start: Tensor, edges: Tensor) -> Tensor:
    """All rows where a few steps do not suffice: masks of training need two."""
    before = rows = start
    for _ in range(_STEPS):
        before, rows = rows, _step(rows, edges)
    return rows | (rows != before).any()


def _step(rows: Tensor, edges: Tensor) -> Tensor:
    """The rows, and those that they see."""
    return rows | (torch.bmm(rows.to(torch.float32).unsqueeze(1), edges).squeeze(1) > 0)
