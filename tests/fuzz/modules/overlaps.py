"""Writes whose result depends on the order in which a kernel takes elements: eager PyTorch says nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Overlaps(TorchDispatchMode):
    """Sees whether a tensor is written to while another view of what is written is read: ``x += x[:, :1]``.

    Attributes:
        found: whether one was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and look at what it writes."""
        if func._schema.is_mutable and not self.found:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            writes = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            parts = [(name in writes, t) for name, value in given.items() for t in pytree.tree_leaves(value)]
            tensors = [(w, t) for w, t in parts if isinstance(t, torch.Tensor) and t.layout is torch.strided]
            self.found = any(w and _is_mixed(t, other) for w, t in tensors for _, other in tensors if other is not t)
        return func(*args, **kwargs or {})


def _is_mixed(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether an element of one is another element of the other."""
    if written.untyped_storage()._cdata != read.untyped_storage()._cdata or not written.numel() or not read.numel():
        return False
    places = [_places(written, written.shape), _places(read, written.shape)]
    if places[1] is None:
        return bool(torch.isin(_places(read, read.shape), places[0]).any())
    return bool((torch.isin(places[1], places[0]) & (places[0] != places[1])).any())


def _places(tensor: torch.Tensor, shape: torch.Size) -> Any:
    """Where each element lies in memory, for a broadcast shape; None where it has not that one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.arange(last + 1).as_strided(tensor.shape, tensor.stride()) + tensor.storage_offset()
    try:
        return places.expand(shape)
    except RuntimeError:
        return None
