"""Iterators that a forward pass takes items of: a graph would compute with those of the traced call for ever."""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from onnxtrain.capture.attribute_reads import within
from onnxtrain.errors import CaptureError

_DEPTH = 4  # iterators of iterators
_TOLD_BY_TEXT = (itertools.count, itertools.repeat)
_BUILT_IN = ("builtins", "itertools", "collections", "array")


class _Seen(NamedTuple):
    name: str  # of the attribute, or what names it
    label: str
    iterator: Iterator[Any]
    before: Any


class TakenItems:
    """The iterators that there are under names, in collections there, and in what functions are bound to.

    Args:
        named: values by what names them.
    """

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._seen = [
            _Seen(name, name + "".join(map(str, steps)), iterator, progress(iterator))
            for name, value in named
            for steps, held in within(value)
            if (iterator := _iterator(held)) is not None
        ]

    def taken(self) -> tuple[str, str] | None:
        """The name and the label of one that has given an item since."""
        found = (seen for seen in self._seen if not _is_same(seen.before, progress(seen.iterator)))
        return next(((seen.name, seen.label) for seen in found), None)


def refused(label: str, source: str) -> CaptureError:
    """The error of a forward pass that takes items of an iterator.

    Args:
        label: what the user calls it.
        source: the line that reads it.
    """
    return CaptureError(
        f"the forward pass reads the iterator {label}; a graph would not take its next item",
        source=source,
        cure="take the item outside of forward, and pass it as an input",
    )


def _iterator(value: Any) -> Iterator[Any] | None:
    """A value that is an iterator, or the one whose ``__next__`` it is."""
    if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        value = value.__self__
    return value if isinstance(value, Iterator) and type(value).__module__ in _BUILT_IN else None


def progress(iterator: Any, depth: int = _DEPTH) -> Any:
    """What tells, compared with what it is later, whether an iterator gave an item meanwhile; none is taken.

    Those of users' own classes are objects, whose attributes tell it.
    """
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
    if isinstance(iterator, _TOLD_BY_TEXT):
        return repr(iterator)
    parts = [] if depth == 0 else [progress(inner, depth - 1) for inner in _inner(iterator)]
    return operator.length_hint(iterator, -1), parts


def _inner(iterator: Any) -> Iterator[Any]:
    """The iterators that another one takes its items of."""
    if isinstance(iterator, itertools.cycle):  # goes through a list from its second time on
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # not there from Python 3.14 on
            warnings.simplefilter("ignore", DeprecationWarning)
            yield from (part for part in iterator.__reduce__()[1] if isinstance(part, Iterator))
    for held in gc.get_referents(iterator):
        parts = held if isinstance(held, tuple) else (held,)
        yield from (part for part in parts if isinstance(part, Iterator) and _iterator(part) is not None)


def _is_same(before: Any, now: Any) -> bool:
    """Whether nothing was taken: numbers and texts are equal, and a generator's variables are the very same."""
    if isinstance(before, tuple | list) and isinstance(now, tuple | list) and len(before) == len(now):
        return all(map(_is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(value is now[name] for name, value in before.items())
    return type(before) is type(now) and before == now
