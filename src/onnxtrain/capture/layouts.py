"""The order in memory of what calls return, where torch says another one of tensors without content.

Which copies a program makes depends on it: ``x.reshape(-1)`` is a view of a contiguous tensor, so that what is written
there is written in ``x``, and a copy of a transposed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor
_Layout = Callable[..., Tensor]  # of what a call returns first, and its arguments


def layouts() -> Any:
    """Within it tensors without content lie in memory as real ones do."""
    return replaced((FakeTensorMode, "_dispatch_impl", _dispatch_impl))


def _dispatch_impl(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    result: Any = _DISPATCH_IMPL(self, func, types, args, kwargs)
    layout = _LAYOUTS.get(func)
    if layout is None or result is NotImplemented:
        return result
    first, *others = result if isinstance(result, tuple | list) else (result,)
    with self:
        strides = layout(first, *args).stride()
        if strides != first.stride():
            first = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)
    return (first, *others) if others else first


_DISPATCH_IMPL = FakeTensorMode._dispatch_impl


def _elementwise(result: Tensor, input: Any, other: Any, *_: Any) -> Tensor:
    """In the order of what is combined, of two numbers in its own."""
    return input * other if isinstance(input, Tensor) or isinstance(other, Tensor) else result


def _unreduced(result: Tensor, input: Tensor, *_: Any) -> Tensor:
    """Elementwise, in the order of the input, unless it is reduced to a number."""
    return torch.empty_like(input) if result.dim() else result


def _contiguous(result: Tensor, *_: Any) -> Tensor:
    return torch.empty(result.shape, device=result.device)


def _in_format(result: Tensor, input: Tensor, *_: Any) -> Tensor:
    """Channels last where the input is, else contiguous."""
    return torch.empty(result.shape, device=result.device).contiguous(memory_format=suggest_memory_format(input))


_ATEN = torch.ops.aten
_LAYOUTS: dict[Any, _Layout] = {
    **dict.fromkeys(
        (
            _ATEN.copysign.Tensor,
            _ATEN.div.Tensor_mode,
            _ATEN.floor_divide.default,
            _ATEN.heaviside.default,
            _ATEN.logaddexp.default,
            _ATEN.logaddexp2.default,
            _ATEN.logical_and.default,
            _ATEN.logical_or.default,
            _ATEN.logical_xor.default,
            _ATEN.native_dropout_backward.default,
            _ATEN.special_xlog1py.default,
            _ATEN.xlogy.Tensor,
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            _ATEN._batch_norm_with_update.default,
            _ATEN._native_batch_norm_legit.default,
            _ATEN._native_batch_norm_legit.no_stats,
            _ATEN.channel_shuffle.default,
            _ATEN.max_unpool2d.default,
            _ATEN.native_batch_norm.default,
            _ATEN.native_channel_shuffle.default,
            _ATEN.reflection_pad2d.default,
            _ATEN.replication_pad2d.default,
        ),
        _in_format,
    ),
    _ATEN.binary_cross_entropy.default: _unreduced,
    _ATEN.normal.Tensor_Tensor: _contiguous,
}


@substitute(F.one_hot)
def one_hot(input: Tensor, num_classes: int = -1) -> Any:
    """Contiguous: without content torch computes it in another way, in the order of the input."""
    return NotImplemented if input.is_contiguous() else F.one_hot(input.contiguous(), num_classes)


@substitute(F.max_pool1d)
def max_pool1d(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Contiguous where nobody differentiates it, on the CPU: torch has a kernel of its own for that."""
    is_own = not (input.requires_grad and torch.is_grad_enabled()) and input.device.type == "cpu"
    indices = kwargs.get("return_indices") or args[5:6] == (True,)
    if input.is_contiguous() or not is_own or indices:
        return NotImplemented
    return F.max_pool1d(input.contiguous(), *args, **kwargs)


__all__ = ["layouts"]
