"""Values that a graph depends on: which are compared, and what tells one from another."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import fractions
import functools
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import PLAIN, can_be_carried, can_be_counted, is_collection

BY_VALUE = frozenset((*PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format))
_WRITTEN = (fractions.Fraction, decimal.Decimal, range)  # what their text says is all of them


class Same:
    """Something that is equal to itself alone, for as long as it lives: this does not keep it."""

    def __init__(self, value: Any) -> None:
        self._identity = id(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # there are none to it
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Same) and (value := self._value()) is not None and value is other._value()
        )

    def __hash__(self) -> int:
        return self._identity

    def __repr__(self) -> str:
        value = self._value()
        return str(getattr(value, "__qualname__", None) or f"another {type(value).__name__}")


def is_compared(value: Any) -> bool:
    """Whether a value is compared wherever it is an attribute: collections are where they are read, tensors as such."""
    return not (isinstance(value, torch.Tensor) or is_collection(value))


def is_immutable(value: Any) -> bool:
    """Whether a value is plain, so that another one in its place has nothing else that could change."""
    return type(value) in BY_VALUE or isinstance(value, enum.Enum)


def told_apart(value: Any, around: tuple[int, ...] = ()) -> Hashable:
    """What is equal for values that no code can tell apart, and hashable: 1 is not 1.0, and 0.0 is not -0.0.

    Args:
        value: the value. What has neither parts nor a text that says all is equal to itself alone.
        around: the identities of what it is in.
    """
    kind = type(value)
    if isinstance(value, float):
        return kind, float.hex(value)
    if kind in BY_VALUE and kind is not complex:
        return kind, value
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(told_apart, value))
    parts = None if id(value) in around else _parts_of(value)
    return Same(value) if parts is None else (kind, *[told_apart(part, (*around, id(value))) for part in parts])


def shown(told: Hashable) -> str:
    """What ``told_apart`` said of a value, for a person to read."""
    if not isinstance(told, tuple):
        return repr(told)
    kind, *parts = told
    if issubclass(kind, float):
        return repr(float.fromhex(parts[0]))
    if kind in BY_VALUE and kind is not complex:
        return repr(parts[0])
    return f"{kind.__name__}({', '.join(map(shown, parts))})"


def _parts_of(value: Any) -> Sequence[Any] | None:
    """What a value is made of, all of it; None where that is not known."""
    if isinstance(value, _WRITTEN):
        return (str(value),)
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, list | tuple | collections.deque):
        return tuple(value)
    if isinstance(value, dict):
        return *dict.keys(value), *dict.values(value)
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if dataclasses.is_dataclass(value) and not isinstance(value, torch.nn.Module | type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if any((c.__module__, c.__name__) == ("numpy", "generic") for c in type(value).__mro__):
        number = value.item()
        return (number if type(number) in BY_VALUE else value.tobytes(),)
    return None


def told_by_identity(tensor: torch.Tensor) -> Hashable:
    """Which tensor it is, and of what form: graphs read its content at every call, unless it lies in no memory."""
    version = None if tensor.layout == torch.strided or tensor.is_inference() else tensor._version
    return id(tensor), tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad, version


def form_of(value: Any, owned: Collection[int]) -> Hashable:
    """What state is; of tensors that graphs have as inputs, what is not their content."""
    if can_be_counted(value):
        return type(value)
    leaves, spec = pytree.tree_flatten(value)
    told = []
    for x in leaves:
        if can_be_carried(x, owned):
            told.append((x.dtype, x.shape, x.device, x.requires_grad))
        else:
            told.append(told_by_identity(x) if isinstance(x, torch.Tensor) else told_apart(x))
    return spec, tuple(told)


__all__ = ["BY_VALUE", "Same", "form_of", "is_compared", "is_immutable", "shown", "told_apart", "told_by_identity"]
