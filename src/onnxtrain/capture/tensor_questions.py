"""What a tensor is asked that is not its content: its bytes, its type among others, whether it is another one.

And what a size is asked where torch's own code asks its number alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor


@substitute(Tensor.nbytes.__get__)  # type: ignore[attr-defined]
def nbytes(self: Tensor) -> int:
    """Of symbolic sizes too."""
    return self.numel() * self.element_size()


@substitute(Tensor.is_set_to)
def is_set_to(self: Tensor, tensor: Tensor) -> bool:
    """Whether both are the same memory, looked at in one way: of tensors without content torch says no of each."""
    if memory_of(self) != memory_of(tensor) or self.dim() != tensor.dim():
        return False
    return all(a == b for a, b in zip(place_in_memory(self), place_in_memory(tensor), strict=True))


def place_in_memory(tensor: Tensor) -> tuple[int | torch.SymInt, ...]:
    """Sizes and strides of a tensor, and where it begins."""
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


@substitute(Tensor.expand)
def expand(self: Tensor, *size: Any, **named: Any) -> Any:
    """-1 keeps an axis: a number that was given to the module may be that in another call."""
    given = size[0] if len(size) == 1 and isinstance(size[0], tuple | list) else size
    if not any(isinstance(number, torch.SymInt) and number < 0 for number in given):
        return NotImplemented
    return self.expand([int(n) if isinstance(n, torch.SymInt) and n < 0 else n for n in given], **named)


@substitute(torch.result_type)
def result_type(*operands: Any, **named: Any) -> torch.dtype:
    """A type is no result that a program could hold; torch records the call all the same."""
    with _disable_current_modes():
        return torch.result_type(*map(_like, (*operands, *named.values())))


def _like(value: Any) -> Any:
    """A number, or a tensor without elements, that says as much of types as a value does."""
    if isinstance(value, Tensor):
        return torch.empty((0,) if value.dim() else (), dtype=value.dtype)
    return 1.0 if isinstance(value, torch.SymFloat) else 1 if isinstance(value, torch.SymInt) else value
