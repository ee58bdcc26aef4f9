"""A part of a tensor that begins where another tensor says: while it is recorded, a view that begins anywhere."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

_OPERATORS = torch.library.Library("onnxtrain", "FRAGMENT")
_OPERATORS.define("part_at(Tensor(a) self, int dim, Tensor index) -> Tensor(a)")


def _part_at(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """What lies side by side at some places of an axis; without content a part that is as large, in the same memory."""
    start = 0 if isinstance(index, FakeTensor) else int(index[0]) if len(index) else 0
    return self.narrow(dim, start, index.shape[0])


_OPERATORS.impl("part_at", _part_at, "CompositeImplicitAutograd")
PART_AT = torch.ops.onnxtrain.part_at.default

__all__ = ["PART_AT"]
