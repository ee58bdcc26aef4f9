"""What kernels allocate while they run, beside their results: of those where it is much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor | None]
_SCRATCH = 2**14  # bytes that oneDNN takes in the gradient of a weight, about
_BLOCK = 16  # channels that it keeps together
_WRITES = 6  # times as much as reading it costs to add up a weight's gradient
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
    y, weight, more = _blocked(found), _blocked_weight(w), _in_order(x)
    if settings[3]:  # transposed: with strides the result is spread first, with a bias it is added to another one
        spread = math.prod(settings[0]) > 1
        return more + max(_blocked(x) + weight + y + (0 if args[2] is None else y), (2 + spread) * found.nbytes)
    return more + max((_blocked(x) if x.shape[1] > _FEW else 0) + weight + y, y + found.nbytes)


def _convolution_backward(args: Sequence[Any], found: Tensors) -> int:
    """The gradient of the operand, then that of the weight."""
    dy, x, w, settings = args[0], args[1], args[2], args[4:10]
    if not _is_reordered(x):
        return 0
    if not _is_of_onednn(x, w, settings):
        return _windows(x, w, dy) + sum(t.nbytes for t in found if t is not None)
    dx = 0 if found[0] is None else found[0].nbytes
    made, weight = _blocked(x, 0), _blocked_weight(w)
    first = max(_blocked(dy) + weight + made, made + dx) if dx else 0
    copies = _copies(x, w, dy)
    operands = _blocked(dy) + (_blocked(x) if x.shape[1] > _FEW else 0)
    second = dx + operands + copies * weight + (_SCRATCH if copies > 1 else 0)
    return _in_order(dy) + _in_order(x) + max(first, second, dx + w.nbytes + weight)


def _in_order(x: torch.Tensor) -> int:
    """Bytes of a copy whose elements lie in order, where those of a tensor do not."""
    return 0 if x.is_contiguous() else x.nbytes


def _copies(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> int:
    """How many gradients of a weight oneDNN adds up: as many as groups of threads share the rows among them.

    It divides threads among rows and channels so that least is read and written (``balance`` in its
    ``jit_avx512_common_conv_kernel.cpp``).
    """
    threads, blocks = torch.get_num_threads(), [-(-channels // _BLOCK) for channels in w.shape[:2]]
    found = []
    for rows in range(1, min(threads, x.shape[0]) + 1):
        for outer in range(1, min(threads // rows, blocks[0]) + 1):
            inner = min(threads // rows // outer, blocks[1])
            read = x.nbytes / rows / inner + dy.nbytes / rows / outer
            found.append((read + _WRITES * w.nbytes / outer / inner, rows))
    return min(found)[1]


def _is_reordered(x: torch.Tensor) -> bool:
    order = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return x.device.type == "cpu" and (x.dim() < 4 or not x.is_contiguous(memory_format=order) or x.is_contiguous())


def _is_of_onednn(x: torch.Tensor, w: torch.Tensor, settings: Sequence[Any]) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    stride, padding, dilation, transposed, output_padding, groups = settings
    rest = (None, stride, padding, dilation, transposed, output_padding, groups, None)
    name = str(torch._C._select_conv_backend(x, w, *rest))
    return "Mkldnn" in name or name.endswith("???")  # that of transposed convolution has no name in Python


def _blocked(x: torch.Tensor, few: int = _FEW) -> int:
    """Bytes of a tensor whose channels are kept in blocks, but for few ones."""
    channels = 1 if x.dim() < 3 else x.shape[1]
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    return x.nbytes if channels <= few else x.nbytes // max(channels, 1) * -(-channels // block) * block


def _blocked_weight(w: torch.Tensor) -> int:
    """Bytes of a weight whose channels, but for few ones, are kept in blocks."""
    whole = [-(-c // _BLOCK) * _BLOCK if c > _FEW else c for c in w.shape[:2]]
    return w.nbytes // max(math.prod(w.shape[:2]), 1) * math.prod(whole)


def _windows(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> int:
    places = math.prod(y.shape[2:])
    return x.shape[0] * x.shape[1] * math.prod(w.shape[2:]) * places * x.itemsize


def _dropout(args: Sequence[Any], found: Tensors) -> int:
    """On the CPU the mask in the type of what it multiplies, the mask itself and the result."""
    y, mask = found
    return 0 if y is None or mask is None or y.device.type != "cpu" else 2 * y.nbytes + mask.nbytes


def _dropout_backward(args: Sequence[Any], found: torch.Tensor) -> int:
    """On the CPU the mask in the type of the gradient, and the result."""
    return 2 * found.nbytes if found.device.type == "cpu" else 0


def _layer_normalization_backward(args: Sequence[Any], found: Tensors) -> int:
    """Copies of operands whose elements do not lie in order, and the results."""
    return _in_order(args[0]) + _in_order(args[1]) + sum(t.nbytes for t in found if t is not None)


def _normalization_backward(args: Sequence[Any], found: Tensors) -> int:
    """Where all lie in order on the CPU, the gradient of the operand twice."""
    in_order = args[0].device.type == "cpu" and args[0].is_contiguous() and args[1].is_contiguous()
    return sum(t.nbytes for t in (*found, found[0]) if t is not None) if in_order else 0


_FORMULAS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    aten.convolution.default: _convolution,
    aten.native_batch_norm_backward.default: _normalization_backward,
    aten.native_dropout.default: _dropout,
    aten.native_layer_norm_backward.default: _layer_normalization_backward,
    aten.native_dropout_backward.default: _dropout_backward,
    aten.convolution_backward.default: _convolution_backward,
}
