"""The order of axes: in memory, which views told by strides read, and of views in the order of another tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._sympy.functions import Max

from onnxtrain.capture.symbolic_sizes import expression_of
from onnxtrain.errors import CaptureError


def order_in_memory(value: torch.Tensor) -> list[int] | None:
    """A tensor's axes as they lie in memory, the outermost first; None where it is not all of its memory, once."""
    hints = [_hint(stride) for stride in value.stride()]
    order = list(range(value.dim()))
    if None not in hints:
        order.sort(key=lambda axis: -hints[axis])  # type: ignore[operator]
    expected: Any = 1
    for axis in reversed(order):
        if str(value.shape[axis]) == "1":
            continue
        if str(_where_there_is_any(value.stride(axis))) != str(expected):
            return None
        expected = expected * value.shape[axis]
    return order if str(value.storage_offset()) == "0" else None


def lies_in_order(value: torch.Tensor) -> bool:
    """Whether a tensor's axes lie in memory one within the other, the last one innermost."""
    within = sympy.Integer(1)
    steps, is_whole = list[int | None](), True
    for size, step in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if expression_of(size) != 1:
            steps.append(_hint(step))
            is_whole = is_whole and _where_there_is_any(step) == within
        within *= expression_of(size)
    known = [step for step in steps if step is not None]
    return is_whole or (len(known) == len(steps) and known == sorted(known))


def is_empty(value: torch.Tensor) -> bool:
    """Whether a tensor has no element; of a size that depends on content torch cannot tell."""
    return any(guard_or_false(size == 0) for size in value.shape)


def _where_there_is_any(stride: Any) -> sympy.Basic:
    """A stride of a tensor that has elements: torch takes an axis for one of a single element where it may be empty."""
    return expression_of(stride).replace(Max, lambda *parts: math.prod(p for p in parts if p != 1))


def order_of_view(name: str, given: dict[str, Any], rank: int) -> list[int] | None:
    """The order that a view has of the axes of what it is a view of; None where it is no permutation.

    Args:
        name: of the operator that makes it.
        given: the operator's arguments, by name.
        rank: how many axes there are.
    """
    if name == "permute":
        return [d % rank for d in given["dims"]]
    if name in ("t", "t_", "numpy_T", "mT", "mH", "matrix_H", "adjoint"):
        pair = (0, 1) if name in ("t", "t_") else (-2, -1)
        return list(reversed(range(rank))) if name == "numpy_T" or rank < 2 else _swapped(rank, *pair)
    if name.removesuffix("_") in ("transpose", "swapaxes", "swapdims"):
        pair = [v for k, v in given.items() if k in ("dim0", "dim1", "axis0", "axis1")]
        return _swapped(rank, *pair)
    if name in ("movedim", "moveaxis"):
        probe = torch.empty(*range(2, rank + 2), device="meta")
        moved = torch.movedim(probe, given["source"], given["destination"])
        return [size - 2 for size in moved.shape]
    return None


def inverted(order: list[int]) -> list[int]:
    """The order that undoes another."""
    return [order.index(axis) for axis in range(len(order))]


def offset_of(value: torch.Tensor) -> int:
    """Where in its memory a tensor begins.

    Raises:
        CaptureError: at a place that depends on sizes.
    """
    offset = value.storage_offset()
    if not isinstance(offset, int):
        raise refused_strides()
    return offset


def refuse_beyond(sizes: Sequence[Any], strides: Sequence[Any], offset: Any, whole: torch.Tensor) -> None:
    """Of a loss, which PyTorch makes in the memory of its terms, what lies beside it can be read, and is anything.

    Raises:
        CaptureError: strides reach, whatever the sizes of inputs are, beyond the memory that a tensor fills.
    """
    if not all(isinstance(n, int) for n in (*sizes, *strides, offset, *whole.shape)) or 0 in sizes:
        return
    if offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) >= whole.numel():
        raise CaptureError(
            "the forward pass calls as_strided and reads beyond a tensor",
            cure="read what the tensor has; what lies beside it in memory is whatever was computed there before",
        )


def refused_strides(name: str = "as_strided") -> CaptureError:
    """The error for strides of a memory whose order is not known."""
    return CaptureError(
        f"the forward pass calls {name} on a part of a tensor",
        cure=f"call it on a copy, x.clone().contiguous().{name}(...), or use unfold, transpose and slices",
    )


def _hint(stride: Any) -> int | None:
    return stride if isinstance(stride, int) else stride.node.hint


def _swapped(rank: int, first: int, second: int) -> list[int]:
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return order
