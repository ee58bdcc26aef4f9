"""What a forward pass leaves in lists, dicts and sets that are attributes, or within such: found, and taken back."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from onnxtrain.capture.attribute_reads import attribute, is_number, may_hold, within
from onnxtrain.capture.held_content import is_plain, is_told
from onnxtrain.capture.places import LEFT, Kind, Place, content_of, fill, holds
from onnxtrain.errors import CaptureError, NumberError

Counts = Callable[[Place, str, Any, Any], NumberError]  # the error for a number that was changed


class LeftInCollections:
    """The collections that there are now, and what is in them.

    Args:
        module: the module that holds them.
        tables: the attributes of its parts and of the objects that they hold, with the place of these.
        ignored: names of attributes that are left out.
    """

    def __init__(
        self, module: torch.nn.Module, tables: Iterable[tuple[Place, Mapping[str, Any]]], ignored: Collection[str]
    ) -> None:
        self._module = module
        self._held: dict[int, tuple[Place, Any, Any]] = {}
        for place, table in tables:
            for name, value in may_hold(table):
                for items, held in within(value) if name not in ignored else ():
                    if isinstance(held, LEFT):
                        steps = (*place.steps, name, *items)
                        own = dataclasses.replace(place, steps=steps[:-1], name=steps[-1])
                        self._held.setdefault(id(held), (own, held, content_of(held)))

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._held

    def inner(self) -> Iterator[tuple[Place, Any]]:
        """Those within others that are where they were, with their places."""
        for place, held, _ in self._held.values():
            if place.name != place.attribute and attribute(place.owner(self._module), place.name) is held:
                yield place, held

    def left(
        self, place: Place, value: Any, replaced: Mapping[int, Any], counts: Counts, counted: Collection[Place]
    ) -> dict[Place, Any]:
        """What one has by now that it did not have; nothing where it was not there.

        Args:
            place: where it is.
            value: it.
            replaced: the tensors in whose place others are now, by the identities of these.
            counts: the error for a number that was changed.
            counted: the places of numbers that may be.

        Raises:
            NumberError: another number was changed.
            CaptureError: a part of a list is another now.
        """
        if value not in self:
            return {}
        content = self._held[id(value)][2]
        if isinstance(content, set):
            return _left_in_set(dataclasses.replace(place, kind=Kind.EXTEND), content, value)
        table, now = _entries(content), {k: replaced.get(id(v), v) for k, v in _entries(content_of(value)).items()}
        if not isinstance(content, dict) and len(now) < len(table):
            return _left_in_list(dataclasses.replace(place, kind=Kind.EXTEND), content, list(now.values()))
        numbers = {place.entry(k): v for k, v in now.items() if place.entry(k) in counted and table.get(k) is not v}
        now |= {p.name.key: table[p.name.key] for p in numbers}
        changes = (k for k in table if k in now and (is_another_number(table[k], now[k]) or is_told(table[k], now[k])))
        if counting := [counts(place.entry(k), place.entry(k).label, table[k], now[k]) for k in changes]:
            raise NumberError.of_all(counting)
        if isinstance(content, dict):
            return numbers | _left_in_dict(dataclasses.replace(place, kind=Kind.UPDATE), content, now)
        most = value.maxlen if isinstance(value, collections.deque) else None
        return numbers | _left_in_list(dataclasses.replace(place, kind=Kind.EXTEND), content, list(now.values()), most)

    def take_back(self) -> None:
        """Have them hold again what they held."""
        for _, held, content in self._held.values():
            if not holds(held, content):
                fill(held, content)


def is_another_number(old: Any, new: Any) -> bool:
    """Whether a number has become another one."""
    return is_number(old) and is_number(new) and old != new


def _entries(collection: list[Any] | dict[Any, Any]) -> dict[Any, Any]:
    return collection if isinstance(collection, dict) else dict(enumerate(collection))


def _left_in_list(place: Place, content: list[Any], new: list[Any], most: int | None = None) -> dict[Place, Any]:
    """What a list has more than it had, or all that it has.

    Args:
        place: of the list.
        content: what it had.
        new: what it has.
        most: how much it can have; of the first there is as much less.

    Raises:
        CaptureError: some of it is what it had, at which a graph does not look.
    """
    for gone in range(len(content) + 1 if len(new) == most else 1):
        more = new[len(content) - gone :]
        if len(more) == len(new) - len(content) + gone and all(map(operator.is_, content[gone:], new)):
            return {place: more} if more else {}
    return _another_content(place, content, new)


def _left_in_dict(place: Place, content: dict[Any, Any], new: dict[Any, Any]) -> dict[Place, Any]:
    """The entries of a dict that are others than they were, or all, where some are not where they were."""
    if [k for k in new if k in content] != [*content]:  # some are gone, or come in another order
        return _another_content(place, content.values(), new)
    changed = {k: v for k, v in new.items() if k not in content or content[k] is not v}
    return {place: changed} if changed else {}


def _left_in_set(place: Place, content: set[Any], new: set[Any]) -> dict[Place, Any]:
    """What a set has more than it had, or all that it has, where there is less."""
    if content - new:
        return _another_content(place, content, [*new])
    return {place: [*new - content]} if new - content else {}


def _another_content(place: Place, content: Collection[Any], new: Any) -> dict[Place, Any]:
    """All that a collection has.

    Raises:
        CaptureError: some of it is what it had, at which a graph does not look.
    """
    kept = {*map(id, content)} & {*map(id, new.values() if isinstance(new, dict) else new)}
    if kept and not all(map(is_plain, content)):
        raise CaptureError(
            f"the forward pass changes a part of the list {place.label}; a graph would not look what else is in it",
            cure=f"let it set a new one, self.{place.attribute} = [...], or change it outside of forward",
        )
    return {dataclasses.replace(place, kind=Kind.FILL): new}
