"""What is in the collections that a module holds, however deep, and in arrays and queues: a graph changes none of it.

Lists and dicts that are attributes are left out: what a call leaves there a graph leaves again (``left_behind``).
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from onnxtrain.capture.attribute_reads import is_array, items_of, may_hold
from onnxtrain.capture.descriptions import PLAIN
from onnxtrain.capture.places import LEFT, Place
from onnxtrain.capture.schema import SYMBOLS

_COLLECTIONS = (list, dict, set, collections.deque, bytearray)
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
        is_left: whether a graph leaves again what a call leaves in the lists and dicts that are attributes.
    """

    def __init__(
        self, tables: Iterable[tuple[Place, Mapping[str, Any]]], ignored: Collection[str] = (), is_left: bool = True
    ) -> None:
        held: dict[int, _Held] = {}
        for place, table in tables:
            for name, value in may_hold(table):
                if name not in ignored and (isinstance(value, (*_COLLECTIONS, tuple)) or is_array(value)):
                    own = dataclasses.replace(place, name=name)
                    for label, content in _within(own.label, value, {}, is_left):
                        held.setdefault(id(content), _Held(own, label, content, copy.copy(content)))
        self._held = list(held.values())

    def changed(self) -> tuple[Place, str, Any, Any] | None:
        """What is another by now: place and label, what it was and what it is; None where there is only more."""
        changes = ((held, key, value, new) for held in self._held for key, value, new in _changes(held))
        return next(((held.place, f"{held.label}[{key!r}]", value, new) for held, key, value, new in changes), None)

    def put_back(self) -> None:
        """Put back what is another by now, and leave what there is more."""
        for held in self._held:
            for key, value, _ in list(_changes(held)):
                if is_array(held.content):
                    held.content.flat[key] = value
                else:
                    held.content[key] = value

    def take_back(self) -> None:
        """Put back what was there."""
        for _, _, content, before in self._held:
            if is_array(content):
                content[...] = before
            elif isinstance(content, list | bytearray):
                content[:] = before
            else:
                content.clear()
                for item in dict.items(before) if isinstance(content, dict) else before:
                    _add(content, item)


def _add(content: Any, item: Any) -> None:
    if isinstance(content, dict):
        content[item[0]] = item[1]
    elif isinstance(content, set):
        content.add(item)
    else:
        content.append(item)


def _changes(held: _Held) -> Iterator[tuple[Any, Any, Any]]:
    """Key, what was there and what is there, of plain values that are others by now."""
    old, new = _items(held.before), _items(held.content)
    for key, value in old.items():
        if key in new and is_another(value, new[key]):
            yield key, value, new[key]


def _within(label: str, value: Any, seen: dict[int, Any], is_left: bool) -> Iterator[tuple[str, Any]]:
    """The collections in a value, and itself where it is one that a graph does not write to."""
    seen[id(value)] = value
    is_small = (isinstance(value, _COLLECTIONS) and len(value) <= _LARGEST) or (
        is_array(value) and value.nbytes <= _LARGEST_ARRAY
    )
    if is_small and not (is_left and type(value) in LEFT):
        yield label, value
    for item, inner in items_of(value):
        if id(inner) not in seen and (isinstance(inner, (*_COLLECTIONS, tuple)) or is_array(inner)):
            yield from _within(label + "".join(map(str, item)), inner, seen, is_left=False)


def _items(content: Any) -> dict[Any, Any]:
    if isinstance(content, dict):
        return {k: v for k, v in dict.items(content) if type(v) in PLAIN and not isinstance(k, SYMBOLS)}
    if isinstance(content, set):
        return {}  # it has more or less, and nothing else
    return dict(enumerate(content.reshape(-1).tolist() if is_array(content) else content))


def is_another(before: Any, now: Any) -> bool:
    """Whether a plain value has become another one."""
    if before is now or type(before) not in PLAIN or type(now) not in PLAIN:
        return False
    return not ((type(before) is type(now) and before == now) or (before != before and now != now))


__all__ = ["HeldContent", "is_another"]
