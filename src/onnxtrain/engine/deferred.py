"""Outputs that are computed when they are first read: logits beside a loss, which most training loops never look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_TENSOR = torch.Tensor
_METADATA = {
    _TENSOR.size, _TENSOR.dim, _TENSOR.ndimension, _TENSOR.numel, _TENSOR.nelement, _TENSOR.element_size,
    _TENSOR.is_floating_point, _TENSOR.is_complex, _TENSOR.__len__, _TENSOR.__hash__,
    *(getattr(_TENSOR, name).__get__ for name in
      ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "is_cpu", "itemsize", "nbytes")),
}  # fmt: skip


class DeferredTensor(torch.Tensor):
    """A tensor whose content is computed at the first operation that needs it; sizes and types are known at once.

    Args:
        shape: its sizes.
        dtype: its element type.
        device: where it will be.
        requires_grad: whether a gradient will flow through it.
        compute: gives the content.
    """

    @staticmethod
    def __new__(
        cls: type[DeferredTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        compute: Callable[[], torch.Tensor],
    ) -> DeferredTensor:
        """A tensor without content yet."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made._requires, made._compute, made._content = requires_grad, compute, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata as it is; anything else on the content."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _TENSOR.requires_grad.__get__:  # type: ignore[attr-defined]
            return args[0]._requires
        args, kwargs = pytree.tree_map_only(DeferredTensor, content_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What reaches the dispatcher without the step before it."""
        args, kwargs = pytree.tree_map_only(DeferredTensor, content_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def content_of(tensor: Any) -> torch.Tensor:
    """The content of a deferred tensor, computed once."""
    if tensor._content is None:
        tensor._content, tensor._compute = tensor._compute(), None
    return tensor._content
