"""What a forward pass reads in collections, global names and closures: a graph serves calls that read the same."""

from __future__ import annotations

import array
import collections
import functools
import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture import (
    LEFT_IN,
    OWN,
    PLAIN,
    Captured,
    Item,
    Kind,
    Named,
    Place,
    are_settings,
    attribute,
    attributes_carried,
    attributes_of,
    inner_of,
    is_array,
    is_collection,
    is_foreign,
    is_librarys,
    owners_of,
    places_carried,
    within,
)
from onnxtrain.ortmodule.values import BY_VALUE, Same, is_compared, told_apart

_COLLECTIONS = (list, tuple, dict, set, frozenset, collections.deque, bytearray, array.array)
_LARGEST = 1000  # values of a collection; of a larger one their number is compared
_LARGEST_ARRAY = 1 << 16  # bytes; of a larger one type and sizes are compared


_Key = tuple[type, str, int]  # class of an owner, name of its attribute, identity of the owner


class Contents:
    """Values as they are now, to be compared with what they are later.

    Args:
        named: the values.
        module: the module that reads them: what is in itself and its parts is compared elsewhere (``guards``).
    """

    def __init__(self, named: Iterable[Named], module: torch.nn.Module) -> None:
        self._named, self._module = [each for each in named if not each.is_unset], module
        self._own = {id(owner): owner for owner in owners_of(module)}
        self._remember([named.read() for named in self._named])
        self._frozen = [self._as_it_is(value) for value in self._values]

    def _remember(self, values: list[Any]) -> None:
        """What is compared first: values by identity, then what is in collections."""
        self._values = values
        self._inner = [(held, _children(held)) for held in self._collections_in(values)]

    def are_the_same(self) -> bool:
        """Whether all values, and what is in them, are what they were."""
        now = [named.read() for named in self._named]
        is_same = all(map(operator.is_, now, self._values))
        if is_same and all(_are_the_same(_children(held), before) for held, before in self._inner):
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
        if type(value) in BY_VALUE or isinstance(value, Same):
            return value if isinstance(value, Same) else told_apart(value)
        if not self._has_content(value, is_named=seen is None):
            return Same(value)
        seen = {} if seen is None else seen
        if id(value) in seen:
            return Same, seen[id(value)]
        seen[id(value)] = len(seen)
        own = Same(value) if isinstance(value, torch.nn.Module) else type(value)
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
        is_one = isinstance(value, _COLLECTIONS) or is_array(value) or bool(inner_of(value))
        return is_one or (not is_named and are_settings(value))


def collections_read(module: torch.nn.Module, captured: Captured, unread: Collection[Place] = ()) -> list[Named]:
    """The collections that a captured call reads on its module, without numbers in them that are state.

    Args:
        module: the module.
        captured: the call.
        unread: the collections in which calls leave something and of which they do not read what is there.
    """
    state, seen = attributes_carried(module), _Seen(module, captured, unread)
    return [
        Named(f"{type(owner).__name__}.{name}", functools.partial(seen.of, owner, name))
        for owner in owners_of(module)
        for name, value in attributes_of(owner).items()
        if (type(owner), name) in captured.read and (is_collection(value) or inner_of(value))
        if (id(owner), name) not in state
    ]


class _Seen:
    """What a call may have read of the collections of attributes.

    Of those in which it leaves something that is plain values, for what else is there is another at the next call; of
    those that it does not read only where it leaves constants.

    Args:
        module: the module.
        captured: the call.
        unread: the places of those that it does not read.
    """

    def __init__(self, module: torch.nn.Module, captured: Captured, unread: Collection[Place]) -> None:
        made = captured.outputs.restore([Same(None)] * captured.outputs.tensors) if captured.left else ((), (), ())
        left = zip(captured.left, made[1], strict=True)  # in the places of tensors something else
        self._left = {place: _constants(place, value) for place, value in left if place.kind in LEFT_IN}
        self._numbers = [place for place in places_carried(module) if isinstance(place.name, Item)]
        self._module, self._unread = module, frozenset(place for place in self._left if place in unread)

    def of(self, owner: Any, name: str) -> Any:
        """What an attribute holds now; itself, where nothing in it changes."""
        value = attribute(owner, name)
        numbers = {(id(place.owner(self._module)), place.name.key) for place in self._numbers}
        left = {id(attribute(place.owner(self._module), place.name)): place for place in self._left}
        changing = left.keys() | {held for held, _ in numbers}
        return self._seen(value, left, numbers) if any(id(x) in changing for _, x in within(value)) else value

    def _seen(
        self, value: Any, left: Mapping[int, Place], numbers: Collection[tuple[int, Any]], is_plain: bool = False
    ) -> Any:
        place = left.get(id(value))
        if not isinstance(value, _COLLECTIONS):
            return value if type(value) in BY_VALUE or not is_plain else None
        pairs, is_plain = _pairs(value), is_plain or place is not None
        if place in self._unread:
            pairs = [(k, x) for k, x in pairs if k in self._left[place]]
        if isinstance(value, set | frozenset):
            return {x for _, x in pairs if type(x) in BY_VALUE or not is_plain}
        kept = [(k, None if (id(value), k) in numbers else self._seen(x, left, numbers, is_plain)) for k, x in pairs]
        return dict(kept) if isinstance(value, dict) else [x for _, x in kept]


def _constants(place: Place, left: Any) -> frozenset[Any]:
    """Where in a collection there are constants once they are left, which may be read before they are others."""
    pairs = () if place.kind is Kind.EXTEND else _pairs(left)
    return frozenset(k for k, v in pairs if type(v) in BY_VALUE)


def _pairs(held: Any) -> Iterable[tuple[Any, Any]]:
    """What is in a collection, with where; of a set it does not matter."""
    return dict.items(held) if isinstance(held, dict) else enumerate(held)


def settled(module: torch.nn.Module) -> dict[_Key, Hashable]:
    """What the attributes are by class, name and owner; those of libraries' classes are set once, and left out."""
    return {
        (type(owner), name, id(owner)): told_apart(value)
        for owner in owners_of(module)
        if is_foreign(home := type(owner).__module__) or not is_librarys(home)
        for name, value in attributes_of(owner).items()
        if name not in OWN and is_compared(value)
    }


def settles(before: dict[_Key, Hashable], module: torch.nn.Module, read: Collection[tuple[type, str]]) -> bool:
    """Whether a call set an attribute that it read, or that was not there: the next one may go another way.

    Args:
        before: the attributes as they were (``settled``).
        module: the module.
        read: the attributes that the call read, by class and name.
    """
    now = settled(module)
    changed = [key for key, told in before.items() if now.get(key, told) != told]
    owners = {owner for _, _, owner in before}
    return any(key[:2] in read for key in changed) or any(key not in before and key[2] in owners for key in now)


def _children(value: Any) -> list[Any]:
    """What is in a collection, an array, a module or an object; of a collection or array that is large, how much."""
    if isinstance(value, torch.nn.Module):
        return [x for part in value.modules() for x in _state_of(part)]
    if is_array(value):
        return [value.dtype.str, *value.shape, value.tobytes() if value.nbytes <= _LARGEST_ARRAY else None]
    if inner := inner_of(value):
        return inner
    if not isinstance(value, _COLLECTIONS):  # an object; those that it has are only told apart
        return [x for n, v in attributes_of(value).items() for x in (n, Same(v) if are_settings(v) else v)]
    if len(value) > _LARGEST:
        return [len(value)]
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]  # some load what they have when they are asked themselves
    return sorted(value, key=hash) if isinstance(value, set | frozenset) else list(value)


def _state_of(module: torch.nn.Module) -> Iterator[Any]:
    """The mode of a module, its parameters and buffers, and its attributes that are plain values."""
    yield module.training
    yield from (*module._parameters.values(), *module._buffers.values())
    yield from (v for n, v in vars(module).items() if n not in OWN and type(v) in BY_VALUE)


def _are_the_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    if len(now) != len(before):
        return False
    pairs = zip(now, before, strict=True)
    return all(map(operator.is_, now, before)) or all(a is b or _are_equal(a, b) for a, b in pairs)


def _are_equal(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, Same) else type(one) in BY_VALUE and told_apart(one) == told_apart(other)
