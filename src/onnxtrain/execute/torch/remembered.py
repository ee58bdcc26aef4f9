"""Results of operators on tensors without content, remembered: what follows from sizes alone is found once.

A model of many layers runs the same operators on the same sizes again and again, and PyTorch takes more than a tenth of
a millisecond to tell what comes of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily


@dataclasses.dataclass(frozen=True)
class _Made:
    """A tensor that an operator returns.

    Args:
        given: the place of the one whose memory it has among the tensors that the operator is given; None for its own.
        is_itself: whether it is that one.
        place: its sizes, its strides and its offset.
        dtype: of its elements.
        device: where it is.
    """

    given: int | None
    is_itself: bool
    place: tuple[Sequence[int], Sequence[int], int]
    dtype: torch.dtype
    device: torch.device


class Remembered:
    """Runs operators on tensors without content.

    Args:
        mode: in which these are made.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, tuple[type, list[_Made]] | None] = {}

    def __call__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator returns: it is run where it was not yet, or where more than sizes decide."""
        tensors: list[torch.Tensor] = []
        key = _key(function, args, kwargs, tensors)
        if key is None:
            return function(*args, **kwargs)
        if key not in self._known:
            found = function(*args, **kwargs)
            self._known[key] = _told(found, tensors)
            return found
        if (known := self._known[key]) is None:
            return function(*args, **kwargs)
        kind, made = known
        with unset_fake_temporarily():
            again = [self._again(m, tensors) for m in made]
        return again[0] if kind is FakeTensor else kind(again)

    def _again(self, made: _Made, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor like one that was made."""
        if made.given is not None and made.is_itself:
            return tensors[made.given]
        shape, strides, offset = made.place
        if made.given is None:
            meta = torch.empty_strided(shape, strides, dtype=made.dtype, device="meta")
        else:
            memory = tensors[made.given].untyped_storage()
            meta = torch.empty(0, dtype=made.dtype, device="meta").set_(memory, offset, shape, strides)
        return FakeTensor(self._mode, meta, made.device)


def _key(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
    """What decides on the result, and the tensors that are given; None where that is not known."""
    if not isinstance(function, OpOverload) or function.namespace not in ("aten", "prims"):
        return None
    if torch.Tag.inplace_view in function.tags:
        return None
    try:
        told = (function, _seen(args, tensors), *((name, _seen(x, tensors)) for name, x in kwargs.items()))
    except TypeError:
        return None
    memories = [x.untyped_storage()._cdata for x in tensors]
    return (*told, *(memories.index(m) for m in memories))


def _seen(x: Any, tensors: list[torch.Tensor]) -> Any:
    """What an operator sees of an argument.

    Raises:
        TypeError: that may be its content.
    """
    if isinstance(x, torch.Tensor):
        is_fake = isinstance(x, FakeTensor)
        if x.layout != torch.strided or (is_fake and x.constant is not None):
            raise TypeError
        tensors.append(x)
        return is_fake, x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device if is_fake else x.device
    if isinstance(x, list | tuple):
        return type(x), tuple(_seen(item, tensors) for item in x)
    hash(x)
    return type(x), x


def _told(found: Any, tensors: Sequence[torch.Tensor]) -> tuple[type, list[_Made]] | None:
    """What can be made again of a result; None where it can not."""
    kind, parts = type(found), found if isinstance(found, list | tuple) else [found]
    if kind not in (FakeTensor, list, tuple) or not all(
        isinstance(x, FakeTensor) and not x.is_conj() and not x.is_neg() for x in parts
    ):
        return None
    memories = [x.untyped_storage()._cdata if isinstance(x, FakeTensor) else 0 for x in tensors]
    own = [x for x in parts if x.untyped_storage()._cdata not in memories]
    if len({x.untyped_storage()._cdata for x in own}) != len(own) or not all(_fills_its_memory(x) for x in own):
        return None
    return kind, [_made(x, memories, tensors) for x in parts]


def _made(x: torch.Tensor, memories: Sequence[int], tensors: Sequence[torch.Tensor]) -> _Made:
    memory = x.untyped_storage()._cdata
    itself = next((i for i, given in enumerate(tensors) if given is x), None)
    given = itself if itself is not None else memories.index(memory) if memory in memories else None
    return _Made(given, itself is not None, (x.shape, x.stride(), int(x.storage_offset())), x.dtype, x.fake_device)


def _fills_its_memory(x: torch.Tensor) -> bool:
    """Whether memory as large as a tensor's elements need is what it has."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    count = last + 1 if x.numel() else 0
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == count * x.element_size()
