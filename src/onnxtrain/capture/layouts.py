"""The order in memory of what calls return, where torch says another one of tensors without content.

Which copies a program makes depends on it: ``x.reshape(-1)`` is a view of a contiguous tensor, so that what is written
there is written in ``x``, and a copy of a transposed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
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


def _contiguous_on_cpu(result: Tensor, *_: Any) -> Tensor:
    return _contiguous(result) if result.device.type == "cpu" else result


def _in_format(result: Tensor, input: Tensor, *_: Any) -> Tensor:
    """Channels last where the input is, else contiguous."""
    return torch.empty(result.shape, device=result.device).contiguous(memory_format=suggest_memory_format(input))


def _rolled(result: Tensor, input: Tensor, shifts: Any, dims: Any = (), *_: Any) -> Tensor:
    """Two parts in a row, in their format, on the CPU; contiguous where all axes are rolled as one."""
    return _in_format(result, input) if dims and result.device.type == "cpu" else _contiguous(result)


def _indexed(result: Tensor, input: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """In the order of what is indexed, and where that says none, in the order of the indices."""
    chosen = {axis: index for axis, index in enumerate(indices) if index is not None}
    are_places = all(i.dtype in (torch.int64, torch.int32) for i in chosen.values())
    if not are_places or all(_in_rows(i) for i in chosen.values()):
        return result
    axes = list(chosen)
    kept = [stride for axis, stride in enumerate(input.stride()) if axis not in chosen]
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    rank = max(i.dim() for i in chosen.values())
    taken = torch.empty_strided(result.shape, (*kept[:first], *[0] * rank, *kept[first:]), device=result.device)
    after = (None,) * (len(kept) - first)
    places = [index[(..., *after)].expand(result.shape) for index in chosen.values()]
    strides = compute_elementwise_output_strides(taken, *places)
    return torch.empty_strided(result.shape, strides, device=result.device)


def _in_rows(index: Tensor) -> bool:
    return index.dim() < 2 or index.is_contiguous()


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
            _ATEN.reflection_pad3d.default,
            _ATEN.replication_pad2d.default,
            _ATEN.replication_pad3d.default,
        ),
        _in_format,
    ),
    **dict.fromkeys(
        (
            _ATEN._log_softmax_backward_data.default,
            _ATEN._standard_gamma.default,
            _ATEN._weight_norm_interface.default,
            _ATEN.grid_sampler_2d.default,
            _ATEN.huber_loss_backward.default,
            _ATEN.isin.Tensor_Scalar,
            _ATEN.isin.Tensor_Tensor,
            _ATEN.mse_loss_backward.default,
            _ATEN.normal.Tensor_Tensor,
            _ATEN.normal.float_Tensor,
            _ATEN.poisson.default,
            _ATEN.pow.Scalar,
            _ATEN.rrelu_with_noise.default,
        ),
        _contiguous,
    ),
    **dict.fromkeys((_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor), _indexed),
    _ATEN.binary_cross_entropy.default: _unreduced,
    _ATEN.log_sigmoid_forward.default: _contiguous_on_cpu,
    _ATEN.roll.default: _rolled,
}


@substitute(F.one_hot)
def one_hot(input: Tensor, num_classes: int = -1) -> Any:
    """Contiguous: without content torch computes it in another way, in the order of the input."""
    return NotImplemented if input.is_contiguous() else F.one_hot(input.contiguous(), num_classes)


@substitute(F.interpolate)
def interpolate(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Contiguous along one axis: without content torch computes it as an index, in the order of the input."""
    if input.dim() != 3 or input.is_contiguous():
        return NotImplemented
    return F.interpolate(input.contiguous(), *args, **kwargs)


@substitute(F.max_pool1d)
def max_pool1d(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Contiguous where nobody differentiates it, on the CPU: torch has a kernel of its own for that."""
    is_own = not (input.requires_grad and torch.is_grad_enabled()) and input.device.type == "cpu"
    indices = kwargs.get("return_indices") or args[5:6] == (True,)
    if input.is_contiguous() or not is_own or indices:
        return NotImplemented
    return F.max_pool1d(input.contiguous(), *args, **kwargs)


__all__ = ["layouts"]
