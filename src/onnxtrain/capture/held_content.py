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
    """

    def __init__(self, tables: Iterable[tuple[Place, Mapping[str, Any]]], ignored: Collection[str]) -> None:
        held: dict[int, _Held] = {}
        for place, table in tables:
            for name, value in may_hold(table):
                if name not in ignored and (isinstance(value, (*_COLLECTIONS, tuple)) or is_array(value)):
                    own = dataclasses.replace(place, name=name)
                    for label, content in _within(own.label, value, {}):
                        held.setdefault(id(content), _Held(own, label, content, copy.copy(content)))
        self._held = list(held.values())

    def changed(self) -> tuple[Place, str, Any, Any] | None:
        """What is another by now: place and label, what it was and what it is; None where there is only more."""
        for place, label, content, before in self._held:
            old, new = _items(before), _items(content)
            for key, value in old.items():
                if key in new and type(value) in PLAIN and type(new[key]) in PLAIN and not _are_same(value, new[key]):
                    return place, f"{label}[{key!r}]", value, new[key]
        return None

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


def _within(label: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """The collections in a value, and itself where it is one that a graph does not write to."""
    is_left = not seen and type(value) in LEFT
    seen[id(value)] = value
    is_small = (isinstance(value, _COLLECTIONS) and len(value) <= _LARGEST) or (
        is_array(value) and value.nbytes <= _LARGEST_ARRAY
    )
    if is_small and not is_left:
        yield label, value
    for item, inner in items_of(value):
        if id(inner) not in seen and (isinstance(inner, (*_COLLECTIONS, tuple)) or is_array(inner)):
            yield from _within(label + "".join(map(str, item)), inner, seen)


def _items(content: Any) -> dict[Any, Any]:
    if isinstance(content, dict):
        return dict(dict.items(content))
    if isinstance(content, set):
        return {}  # it has more or less, and nothing else
    return dict(enumerate(content.reshape(-1).tolist() if is_array(content) else content))


def _are_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other) or (one != one and other != other)


__all__ = ["HeldContent"]
