"""What kernels allocate while they run, beside their results: of those where it is much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor | None]
_SCRATCH = 2**14  # bytes that oneDNN takes in the gradient of a weight, about
_FEW = 4  # channels that oneDNN takes in torch's order


def workspace(function: Any, args: Sequence[Any], found: Any) -> int:
    """Bytes in use at once within a call at most, its results among them; 0 where that is only the results.

    Args:
        function: the operator.
        args: its positional arguments.
        found: its results.
    """
    formula = _FORMULAS.get(function)
    return 0 if formula is None else formula(args, found)


def _convolution(args: Sequence[Any], found: torch.Tensor) -> int:
    """Convolution on the CPU: oneDNN's own order of operands and result, or a matrix of all windows of one image."""
    x, w, settings = args[0], args[1], args[3:9]
    if not _is_reordered(x):
        return 0
    if not _is_of_onednn(x, w, settings):
        return _windows(x, w, found) + found.nbytes
    y = _blocked(found)
    return max((_blocked(x) if x.shape[1] > _FEW else 0) + w.nbytes + y, y + found.nbytes)


def _convolution_backward(args: Sequence[Any], found: Tensors) -> int:
    """The gradient of the operand, then that of the weight."""
    dy, x, w, settings = args[0], args[1], args[2], args[4:10]
    if not _is_reordered(x):
        return 0
    if not _is_of_onednn(x, w, settings):
        return _windows(x, w, dy) + sum(t.nbytes for t in found if t is not None)
    dx = 0 if found[0] is None else found[0].nbytes
    first = max(_blocked(dy) + w.nbytes + _blocked(x), _blocked(x) + dx) if dx else 0
    second = dx + _blocked(dy) + (_blocked(x) if x.shape[1] > _FEW else 0) + 2 * w.nbytes + _SCRATCH
    return max(first, second)


def _is_reordered(x: torch.Tensor) -> bool:
    order = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return x.device.type == "cpu" and (x.dim() < 4 or not x.is_contiguous(memory_format=order) or x.is_contiguous())


def _is_of_onednn(x: torch.Tensor, w: torch.Tensor, settings: Sequence[Any]) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    stride, padding, dilation, transposed, output_padding, groups = settings
    rest = (None, stride, padding, dilation, transposed, output_padding, groups, None)
    return "Mkldnn" in str(torch._C._select_conv_backend(x, w, *rest))


def _blocked(x: torch.Tensor) -> int:
    """Bytes of a tensor whose channels are kept in blocks."""
    channels = 1 if x.dim() < 3 else x.shape[1]
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    return x.nbytes if channels <= _FEW else x.nbytes // max(channels, 1) * -(-channels // block) * block


def _windows(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> int:
    places = math.prod(y.shape[2:])
    return x.shape[0] * x.shape[1] * math.prod(w.shape[2:]) * places * x.itemsize


_FORMULAS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
