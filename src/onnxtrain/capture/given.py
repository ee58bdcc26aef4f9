"""What a forward pass changes in what it is given: entries of a dict, items of a list, attributes of an object.

A trace runs on containers of its own, and a graph on tensors alone. So what a call writes to the containers among its
arguments is found, tensors of it become outputs of the graph, and after each call it is done to the caller's own.
Where a call returns one of them, the caller gets his own back.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.schema import Keys, is_opened

_LISTS = (list, collections.deque)
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Change:
    """What is done to a container.

    Args:
        keys: those that lead from the arguments to it.
        removed: keys of its own that are no longer there.
        extends: whether a list gets more items; else it gets others in the place of all.
    """

    keys: Keys
    removed: tuple[Any, ...] = ()
    extends: bool = False

    @property
    def label(self) -> str:
        """As a person would write it: ``args[0]['losses']``."""
        return "".join([("args", "kwargs")[self.keys[0]], *(f"[{key!r}]" for key in self.keys[1:])])


class Given:
    """Sees what is written to the containers among the arguments of a call from now on.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Attributes:
        keys: for the identity of a container, those that lead to it.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        arguments = (tuple(args), dict(kwargs))
        self._found = [(keys, held) for keys, held in _containers(arguments, ()) if len(keys) > 1]
        self._before = [copy.copy(_content(held)) for _, held in self._found]
        self.keys: dict[int, Keys] = {id(held): keys for keys, held in self._found}

    def changes(self) -> dict[Change, Any]:
        """What was written: for a list its items, else what is new by key."""
        found: dict[Change, Any] = {}
        for (keys, held), before in zip(self._found, self._before, strict=True):
            now = _content(held)
            if isinstance(now, dict):
                removed = tuple(key for key in before if key not in now)
                fresh = {k: v for k, v in now.items() if k not in before or before[k] is not v}
                if removed or fresh:
                    found[Change(keys, removed)] = fresh
            elif len(now) < len(before) or not all(map(operator.is_, before, now)):
                found[Change(keys)] = list(now)
            elif len(now) > len(before):
                found[Change(keys, extends=True)] = list(now)[len(before) :]
        return found


def change(arguments: Arguments, changes: Iterable[Change], values: Iterable[Any]) -> None:
    """Do to the caller's containers what a call has done to those of its trace.

    Args:
        arguments: the caller's.
        changes: what is done.
        values: what containers get, for each.
    """
    held = [(at(arguments, made.keys), made) for made in changes]
    for (container, made), value in zip(held, values, strict=True):
        content = _content(container)
        if isinstance(content, dict):
            for key in made.removed:
                del content[key]
            content.update(value)
            continue
        if not made.extends:
            content.clear()
        content.extend(value)


def at(arguments: Arguments, keys: Keys) -> Any:
    """The container among arguments that keys lead to."""
    found: Any = arguments
    for key in keys:
        content = _content(found)
        found = (found if content is None else content)[key]
    return found


def _content(held: Any) -> Any:
    """What can be written to a container: itself, or the attributes of an object; None where nothing can."""
    if isinstance(held, dict | list | collections.deque):
        return held
    return getattr(held, "__dict__", None) if is_opened(held) else None


def _containers(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """The containers in a value, itself among them, and how to come there."""
    if isinstance(value, torch.Tensor):
        return
    content = _content(value)
    if content is not None:
        yield keys, value
    inner = value if content is None and isinstance(value, tuple) else content
    pairs = inner.items() if isinstance(inner, dict) else enumerate(inner or ())
    for key, held in list(pairs):
        yield from _containers(held, (*keys, key))
