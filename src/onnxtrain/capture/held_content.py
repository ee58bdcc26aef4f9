"""What is in the collections that a module holds, however deep, and in arrays and queues: a graph changes none of it.

Of the module's own those are left out in which a graph leaves again what a call does (``left_in_collections``).
"""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from onnxtrain.capture.attribute_reads import is_array, items_of, may_hold
from onnxtrain.capture.descriptions import PLAIN
from onnxtrain.capture.places import LEFT, Place, fill, holds
from onnxtrain.capture.schema import SYMBOLS, can_be_counted

_COLLECTIONS = (list, dict, set, collections.deque, bytearray, array.array)
_LARGEST = 1000  # items
_LARGEST_ARRAY = 1 << 16  # bytes


class _Held(NamedTuple):
    place: Place  # of the attribute
    label: str
    content: Any
    before: Any


class HeldContent:
    """What is in collections, arrays and queues now.

    Args:
        tables: the attributes of modules and of the objects that they hold, with the place of these.
        ignored: names of attributes that are left out.
        is_left: whether a graph leaves again what a call leaves in lists and dicts.
    """

    def __init__(
        self, tables: Iterable[tuple[Place, Mapping[str, Any]]], ignored: Collection[str] = (), is_left: bool = True
    ) -> None:
        self._tables, self._ignored, self._is_left = list(tables), ignored, is_left
        self._held = [_Held(*found, copy.copy(found[2])) for found in self._reached().values()]

    def _reached(self) -> dict[int, tuple[Place, str, Any]]:
        """The collections that there are, by identity, with the place of the attribute and a label."""
        found: dict[int, tuple[Place, str, Any]] = {}
        for place, table in self._tables:
            for name, value in may_hold(table):
                if name not in self._ignored and (isinstance(value, (*_COLLECTIONS, tuple)) or is_array(value)):
                    own = dataclasses.replace(place, name=name)
                    for label, content in _within(own.label, value, {}, self._is_left):
                        found.setdefault(id(content), (own, label, content))
        return found

    def holds_more(self) -> tuple[Place, str] | None:
        """Where a tensor is by now that was not there."""
        more = {id(held.content): held for held in self._held if _tensors_in(held.content) - _tensors_in(held.before)}
        reached = self._reached() if more else {}
        return next(((held.place, held.label) for held in more.values() if id(held.content) in reached), None)

    def changed(self) -> tuple[Place, str, Any, Any] | None:
        """What is another by now: place and label, what it was and what it is; None where there is only more."""
        changes = ((held, key, value, new) for held in self._held for key, value, new in _changes(held))
        return next(((held.place, f"{held.label}[{key!r}]", value, new) for held, key, value, new in changes), None)

    def grown(self) -> list[str]:
        """The labels of those that have more or less by now, or the same in another order."""
        return [held.label for held in self._held if not _holds(held.content, held.before)]

    def grew_by_sizes(self) -> bool:
        """Whether some have sizes by now, or numbers that sizes tell: a trace has no others."""
        contents = (held.content for held in self._held if isinstance(held.content, LEFT))
        return any(isinstance(x, SYMBOLS) for content in contents for x in _parts(content))

    def put_back(self) -> None:
        """Put back what is another by now, and leave what there is more."""
        for held in self._held:
            for key, value, _ in _changes(held):
                if is_array(held.content):
                    held.content.flat[key] = value
                else:
                    held.content[key] = value

    def take_back(self, but_tensors: bool = False) -> None:
        """Put back what was there; what is as it was is not touched: somebody may be going through it.

        Args:
            but_tensors: whether those are left alone that have tensors which they had not.
        """
        for _, _, content, before in self._held:
            if but_tensors and _tensors_in(content) - _tensors_in(before):
                continue
            if is_array(content):
                content[...] = before
            elif isinstance(content, bytearray | array.array):
                content[:] = before
            elif not holds(content, before):
                fill(content, before)


def _holds(content: Any, before: Any) -> bool:
    """Whether there is as much as there was, and the very same where it is no array; numbers in those are compared."""
    if is_array(content) or isinstance(content, bytearray | array.array):
        return len(content) == len(before)
    return holds(content, before)


def _parts(content: Any) -> Iterator[Any]:
    """The items of a collection, and the keys of a dict; nothing is hashed."""
    yield from content
    if isinstance(content, dict):
        yield from dict.values(content)


def _changes(held: _Held) -> Iterator[tuple[Any, Any, Any]]:
    """Key, what was there and what is there, of plain values that are others by now."""
    old, new = _items(held.before), _items(held.content)
    if isinstance(held.content, collections.Counter):  # what it lacks is 0
        old = dict.fromkeys(new, 0) | old
    for key, value in old.items():
        if key in new and (is_another(value, new[key]) or is_told(value, new[key])):
            yield key, value, new[key]


def _within(label: str, value: Any, seen: dict[int, Any], is_left: bool) -> Iterator[tuple[str, Any]]:
    """The collections in a value, and itself where it is one that a graph does not write to."""
    seen[id(value)] = value
    is_small = (isinstance(value, _COLLECTIONS) and len(value) <= _LARGEST) or (
        is_array(value) and value.nbytes <= _LARGEST_ARRAY
    )
    if is_small and not (is_left and isinstance(value, LEFT)):
        yield label, value
    for item, inner in items_of(value):
        if id(inner) not in seen and (isinstance(inner, (*_COLLECTIONS, tuple)) or is_array(inner)):
            yield from _within(label + "".join(map(str, item)), inner, seen, is_left)


def _tensors_in(content: Any) -> set[int]:
    if is_array(content) or isinstance(content, bytearray | array.array):
        return set()
    values = dict.values(content) if isinstance(content, dict) else content
    return {id(x) for x in values if isinstance(x, torch.Tensor)}


def _items(content: Any) -> dict[Any, Any]:
    if isinstance(content, dict):
        pairs = ((k, v) for k, v in dict.items(content) if not isinstance(k, SYMBOLS))
        return {k: v for k, v in pairs if is_plain(v) or isinstance(v, SYMBOLS)}
    if isinstance(content, set):
        return {}  # it has more or less, and nothing else
    return dict(enumerate(content.reshape(-1).tolist() if is_array(content) else content))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a truth value or None, or a tuple of such."""
    return type(value) in PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def is_told(before: Any, now: Any) -> bool:
    """Whether a number has become one that sizes and other numbers tell: the next call may read it."""
    return can_be_counted(before) and isinstance(now, SYMBOLS)


def is_another(before: Any, now: Any) -> bool:
    """Whether a plain value, or a tuple of such, has become another one."""
    if before is now or not (is_plain(before) and is_plain(now)):
        return False
    return not ((type(before) is type(now) and before == now) or (before != before and now != now))


__all__ = ["HeldContent", "is_another", "is_plain", "is_told"]
