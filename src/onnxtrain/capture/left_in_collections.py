"""What a forward pass leaves in lists and dicts that are attributes, or within such: it is found, and taken back."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from onnxtrain.capture.attribute_reads import attribute, is_number, may_hold, within
from onnxtrain.capture.places import LEFT, Kind, Place, fill
from onnxtrain.errors import CaptureError, NumberError

Counts = Callable[[Place, str, Any, Any], NumberError]  # the error for a number that was changed


class LeftInCollections:
    """The lists and dicts that there are now, and what is in them.

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
                    if type(held) in LEFT:
                        steps = (*place.steps, name, *items)
                        own = dataclasses.replace(place, steps=steps[:-1], name=steps[-1])
                        self._held.setdefault(id(held), (own, held, held.copy()))

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._held

    def inner(self) -> Iterator[tuple[Place, Any]]:
        """Those within others that are where they were, with their places."""
        for place, held, _ in self._held.values():
            if place.name != place.attribute and attribute(place.owner(self._module), place.name) is held:
                yield place, held

    def left(self, place: Place, value: Any, replaced: Mapping[int, Any], counts: Counts) -> dict[Place, Any]:
        """What one has by now that it did not have; nothing where it was not there.

        Args:
            place: where it is.
            value: it.
            replaced: the tensors in whose place others are now, by the identities of these.
            counts: the error for a number that was changed.

        Raises:
            NumberError: a number was changed.
            CaptureError: a part of a list is another now.
        """
        if value not in self:
            return {}
        content = self._held[id(value)][2]
        table, now = _entries(content), {k: replaced.get(id(v), v) for k, v in _entries(value).items()}
        for key in (k for k in table if k in now and is_another_number(table[k], now[k])):
            raise counts(place, f"{place.label}[{key!r}]", table[key], now[key])
        if isinstance(content, dict):
            changed = {k: v for k, v in now.items() if k not in content or content[k] is not v}
            return {dataclasses.replace(place, kind=Kind.UPDATE): changed} if changed else {}
        return _left_in_list(dataclasses.replace(place, kind=Kind.EXTEND), content, list(now.values()))

    def take_back(self) -> None:
        """Have them hold again what they held."""
        for _, held, content in self._held.values():
            fill(held, content)


def is_another_number(old: Any, new: Any) -> bool:
    """Whether a number has become another one."""
    return is_number(old) and is_number(new) and old != new


def _entries(collection: list[Any] | dict[Any, Any]) -> dict[Any, Any]:
    return collection if isinstance(collection, dict) else dict(enumerate(collection))


def _left_in_list(place: Place, content: list[Any], new: list[Any]) -> dict[Place, Any]:
    """What a list has more than it had, or all that it has.

    Raises:
        CaptureError: some of it is what it had, at which a graph does not look.
    """
    if len(new) >= len(content) and all(map(operator.is_, content, new)):
        more = new[len(content) :]
        return {place: more} if more else {}
    if {*map(id, content)} & {*map(id, new)}:
        raise CaptureError(
            f"the forward pass changes a part of the list {place.label}; a graph would not look what else is in it",
            cure=f"let it set a new one, self.{place.attribute} = [...], or change it outside of forward",
        )
    return {dataclasses.replace(place, kind=Kind.FILL): list(new)}
