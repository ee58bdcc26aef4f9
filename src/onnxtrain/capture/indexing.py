"""Indices that torch would read: a place, or a condition, that one number says; and places within nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.capture.looks import is_integer
from onnxtrain.capture.packed_sequences import are_known, rows_of
from onnxtrain.capture.substitutes import of_nothing, substitute

Tensor = torch.Tensor


@substitute(torch.take, Tensor.take)
def take(input: Tensor, index: Tensor) -> Any:
    """At a place that one number says: torch would read it."""
    return NotImplemented if index.dim() else torch.take(input, index.reshape(1)).reshape(())


@substitute(Tensor.__getitem__)
def getitem(self: Tensor, index: Any) -> Any:
    """All of it or nothing, under a condition; at a place beside several, or of each element of ``vmap``; the first of
    batch sizes.
    """
    if type(index) is int and index == 0 and are_known(self):
        return rows_of(self)
    given = index if isinstance(index, tuple) else (index,)
    if any(map(_is_condition, given)):
        whole, places = _with_axes(self, given)
        return whole[places]
    if any(map(_is_place, given)) and any(isinstance(i, Tensor) and i.dim() for i in given):
        whole, rest = _at_places(self, given)
        return whole[rest]
    if any(map(_is_mapped, given)):
        whole, rest = _at_places(self, given, _is_mapped, _selected)
        return whole[rest]
    return NotImplemented


@substitute(Tensor.__setitem__)
def setitem(self: Tensor, index: Any, value: Any) -> Any:
    """At a place, or under a condition; of a value without the axes of one that it has too many."""
    rank = _rank_at(self, index if isinstance(index, tuple) else (index,))
    if rank is not None and isinstance(value, Tensor) and value.dim() > rank:
        self[index] = value.reshape(value.shape[value.dim() - rank :])
        return None
    if isinstance(index, tuple) and any(map(_is_condition, index)):
        whole, places = _with_axes(self, index)
        whole[places] = value
        return None
    if isinstance(index, tuple) and any(map(_is_place, index)):
        whole, rest = _at_places(self, index)
        whole[rest] = value
        return None
    if isinstance(index, Tensor) and index.dim() and _is_other_number(value, self) and index.dtype == torch.bool:
        self[index] = value.to(self.dtype)  # where one number is written, torch brings it to the type
        return None
    if not isinstance(index, Tensor) or index.dim() or index.dtype not in (torch.bool, torch.int32, torch.int64):
        return NotImplemented
    content = value.to(self.dtype) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=self.dtype)
    content = content.to(self.device)
    if index.dtype != torch.bool:
        self.index_put_((index,), content)
    elif content.dim() > self.dim():
        self.unsqueeze(0)[index.reshape(1)] = content
    else:
        self.copy_(torch.where(index, content, self))
    return None


def _written_at(name: str) -> None:
    plain, written = getattr(Tensor, name), getattr(Tensor, f"{name}_")

    @substitute(getattr(torch, name), plain)
    def returned(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Of nothing, which torch gives back wherever the places are; and one place as a list of one."""
        if of_nothing(input.shape):
            return input.clone()
        return NotImplemented if index.dim() else plain(input, dim, index.reshape(1), *args, **kwargs)

    @substitute(written)
    def in_place(self: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        if of_nothing(self.shape):
            return self
        return NotImplemented if index.dim() else written(self, dim, index.reshape(1), *args, **kwargs)


for _name in ("index_add", "index_copy", "index_fill", "index_reduce"):
    _written_at(_name)


@substitute(Tensor.fill_diagonal_)
def fill_diagonal_(self: Tensor, fill_value: Any, wrap: bool = False) -> Any:
    """At the places whose coordinates agree: it has no form that writes nothing."""
    if self.dim() < 2 or (self.dim() > 2 and len(set(map(str, self.shape))) > 1):
        return NotImplemented  # torch says what is wrong
    first, *others = (torch.arange(size, device=self.device) for size in self.shape)
    if wrap and self.dim() == 2:
        first = first % (self.shape[1] + 1)
    places = first.reshape(-1, *[1] * len(others))
    mask = torch.ones((), dtype=torch.bool, device=self.device)
    for axis, other in enumerate(others):
        mask = mask & (places == other.reshape(-1, *[1] * (len(others) - 1 - axis)))
    return self.masked_fill_(mask, fill_value)


def _rank_at(whole: Tensor, index: tuple[Any, ...]) -> int | None:
    """How many axes there are at the places that lists or tensors say; None where none does."""
    places = [i for i in index if isinstance(i, list) or (isinstance(i, Tensor) and i.dim())]
    if not places:
        return None
    kept = sum(i is None or isinstance(i, slice) for i in index)
    flags = [isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in places]
    ranks = [1 if flag else _depth(i) for i, flag in zip(places, flags, strict=True)]
    return whole.dim() - sum(map(_axes, index)) + kept + max(ranks)


def _depth(places: Any) -> int:
    if isinstance(places, list):
        return 1 + (_depth(places[0]) if places else 0)
    return places.dim() if isinstance(places, Tensor) else 0


def _is_condition(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and not index.dim()


def _is_place(index: Any) -> bool:
    """Whether an index is one place that a symbol says: a size, or what one number of a tensor is read as."""
    return isinstance(index, torch.SymInt)


def _is_mapped(index: Any) -> bool:
    """Whether an index is one place for each element that ``vmap`` maps over."""
    return is_integer(index) and torch._C._functorch.is_batchedtensor(index)


def _selected(whole: Tensor, axis: int, place: Tensor) -> Tensor:
    """What is at a place that a tensor says, counted from either end."""
    at = torch.where(place < 0, place + whole.shape[axis], place)
    return whole.index_select(axis, at.reshape(1)).squeeze(axis)


def _at_places(
    whole: Tensor,
    index: tuple[Any, ...],
    is_place: Callable[[Any], bool] = _is_place,
    select: Callable[[Tensor, int, Any], Tensor] = Tensor.select,
) -> tuple[Tensor, tuple[Any, ...]]:
    """What is at the places of an index, and the rest of it, which is an index into that."""
    while found := [i for i, part in enumerate(index) if is_place(part)]:
        before, behind = index[: found[0]], index[found[0] + 1 :]
        is_far = any(i is Ellipsis for i in before)
        axis = whole.dim() - 1 - sum(map(_axes, behind)) if is_far else sum(map(_axes, before))
        whole, index = select(whole, axis, index[found[0]]), (*before, *behind)
    return whole, index or (...,)


def _is_other_number(value: Any, whole: Tensor) -> bool:
    is_number = isinstance(value, Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)
    return is_number and value.dtype != whole.dtype


def _with_axes(whole: Tensor, index: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """A view and an index into it that say the same, with an axis of 1 for each condition."""
    places = list(index)
    for place, part in enumerate(index):
        if _is_condition(part):
            before, behind = (sum(map(_axes, side)) for side in (places[:place], places[place + 1 :]))
            far = any(i is Ellipsis for i in places[:place])
            whole = whole.unsqueeze(whole.dim() - behind if far else before)
            places[place] = part.reshape(1)
    return whole, tuple(places)


def _axes(index: Any) -> int:
    """How many axes a part of an index is for."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) else 1
