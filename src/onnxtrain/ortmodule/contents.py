"""What a forward pass reads in collections, global names and closures: a graph serves calls that read the same."""

from __future__ import annotations

import collections
import copy
import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from onnxtrain.capture import OWN, PLAIN, Captured, Named, are_settings, is_array, is_collection, owners_of

_COLLECTIONS = (list, tuple, dict, set, frozenset, collections.deque)
_BY_VALUE = frozenset((*PLAIN, torch.dtype, torch.device))
_LARGEST = 1000  # values of a collection; of a larger one their number is compared
_LARGEST_ARRAY = 1 << 16  # bytes; of a larger one type and sizes are compared


class Contents:
    """Values as they are now, to be compared with what they are later.

    Args:
        named: the values.
        module: the module that reads them: what is in itself and its parts is compared elsewhere (``guards``).
    """

    def __init__(self, named: Iterable[Named], module: torch.nn.Module) -> None:
        self._named, self._module = list(named), module
        self._own = {id(owner): owner for owner in owners_of(module)}
        self._remember([named.read() for named in self._named])
        self._frozen = [self._as_it_is(value) for value in self._values]

    def _remember(self, values: list[Any]) -> None:
        """What is compared first: values by identity, then what is in collections, of plain values by a copy."""
        self._values, held = values, list(self._collections_in(values))
        plain = [c for c in held if _is_plain(c)]
        self._plain, self._copies = plain, list(map(copy.copy, plain))
        self._others = [(c, _children(c)) for c in held if not _is_plain(c)]

    def are_the_same(self) -> bool:
        """Whether all values, and what is in them, are what they were."""
        now = [read() for _, read in self._named]
        if (
            all(map(operator.is_, now, self._values))
            and all(map(operator.eq, self._plain, self._copies))
            and all(_are_the_same(_children(c), before) for c, before in self._others)
        ):
            return True
        if list(map(self._as_it_is, now)) != self._frozen:
            return False
        self._remember(now)
        return True

    def now(self) -> Contents:
        """The same values, as they are by now."""
        return Contents(self._named, self._module)

    def changed(self) -> dict[str, str]:
        """What is said of those that are others now, by label."""
        found = {}
        for named, before, frozen in zip(self._named, self._values, self._frozen, strict=True):
            if self._as_it_is(now := named.read()) != frozen:
                is_plain = type(before) in PLAIN and type(now) in PLAIN
                found[named.label] = f"was {before!r} and is {now!r}" if is_plain else "has another content"
        return found

    def without(self, labels: Collection[str]) -> Contents:
        """The same but for some labels."""
        kept = [named for named in self._named if named.label not in labels]
        return self if len(kept) == len(self._named) else Contents(kept, self._module)

    def _as_it_is(self, value: Any, seen: dict[int, int] | None = None) -> Any:
        """A value now: equal to one of the same content."""
        if type(value) in _BY_VALUE:
            return type(value), value
        if not self._has_content(value, is_named=seen is None):
            return _Same(value)
        seen = {} if seen is None else seen
        if id(value) in seen:
            return _Same, seen[id(value)]
        seen[id(value)] = len(seen)
        own = _Same(value) if isinstance(value, torch.nn.Module) else type(value)
        return own, [self._as_it_is(child, seen) for child in _children(value)]

    def _collections_in(self, values: Sequence[Any], seen: dict[int, Any] | None = None) -> Iterator[Any]:
        """All that has a content among values, and within."""
        is_named, seen = seen is None, {} if seen is None else seen
        for value in values:
            if id(value) not in seen and self._has_content(value, is_named):
                seen[id(value)] = value
                yield value
                yield from self._collections_in(_children(value), seen)

    def _has_content(self, value: Any, is_named: bool) -> bool:
        """Whether more than its identity is compared; of objects that have a name, code says what it reads."""
        if isinstance(value, torch.nn.Module):
            return id(vars(value).get("_wrapped", value)) not in self._own
        return isinstance(value, _COLLECTIONS) or is_array(value) or (not is_named and are_settings(value))


def collections_read(module: torch.nn.Module, captured: Captured) -> list[Named]:
    """The collections that a captured call reads on its module, and does not leave something in.

    Args:
        module: the module.
        captured: the call.
    """
    left = {(id(vars(module.get_submodule(place.path))), place.name) for place in captured.left}
    tables = [(type(owner), vars(owner)) for owner in owners_of(module)]
    found = [(kind, name, t) for kind, name in captured.read for k, t in tables if k is kind and name in t]
    return [
        Named(f"{kind.__name__}.{name}", functools.partial(table.get, name))
        for kind, name, table in found
        if (id(table), name) not in left and is_collection(table[name])
    ]


class _Same:
    """Something that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _is_plain(value: Any) -> bool:
    """Whether a collection can be compared with a copy of it."""
    return type(value) in _COLLECTIONS and all(type(child) in _BY_VALUE for child in _children(value))


def _children(value: Any) -> list[Any]:
    """What is in a collection, an array, a module or an object; of a collection or array that is large, how much."""
    if isinstance(value, torch.nn.Module):
        return [x for part in value.modules() for x in _state_of(part)]
    if is_array(value):
        return [value.dtype.str, *value.shape, value.tobytes() if value.nbytes <= _LARGEST_ARRAY else None]
    if not isinstance(value, _COLLECTIONS):  # an object; not those that it has
        return [x for n, v in vars(value).items() if not are_settings(v) for x in (n, v)]
    if len(value) > _LARGEST:
        return [len(value)]
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]  # some load what they have when they are asked themselves
    return sorted(value, key=hash) if isinstance(value, set | frozenset) else list(value)


def _state_of(module: torch.nn.Module) -> Iterator[Any]:
    """The mode of a module, its parameters and buffers, and its attributes that are plain values."""
    yield module.training
    yield from (*module._parameters.values(), *module._buffers.values())
    yield from (v for n, v in vars(module).items() if n not in OWN and type(v) in _BY_VALUE)


def _are_the_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a is b or (type(a) in _BY_VALUE and a == b) for a, b in pairs)
