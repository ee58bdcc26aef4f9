"""The names that code mentions and sets, as its instructions say it."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import NamedTuple

OF_CLOSURES = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
OF_GLOBALS = ("LOAD_GLOBAL",)
OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


class Mention(NamedTuple):
    """A name in code, with the attributes that follow on it."""

    kind: str  # the instruction
    path: tuple[str, ...]


def names_in(code: types.CodeType) -> Iterator[Mention]:
    """The names in code, each as a global one and as an attribute."""
    return (Mention(kind, (name,)) for name in code.co_names for kind in ("LOAD_GLOBAL", "LOAD_ATTR"))


@functools.lru_cache(4096)
def mentions_in(code: types.CodeType) -> tuple[Mention, ...]:
    """The names in code, with the attributes that are read of them at once."""
    return tuple(_paths(code))


def _paths(code: types.CodeType) -> Iterator[Mention]:
    latest: Mention | None = None
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, str(instruction.argval)
        if kind in OF_ATTRIBUTES and latest is not None:
            latest = Mention(latest.kind, (*latest.path, name))
            continue
        if latest is not None:
            yield latest
        is_name = kind in OF_GLOBALS or kind in OF_CLOSURES or kind in OF_ATTRIBUTES
        latest = Mention(kind, (name,)) if is_name else None


@functools.lru_cache(4096)
def stores_in(code: types.CodeType) -> tuple[Mention, ...]:
    """What code sets: global names, and attributes, after the names of what they are of where these stand there."""
    found, owner = list[Mention](), tuple[str, ...]()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, str(instruction.argval)
        if kind in ("STORE_ATTR", "STORE_GLOBAL"):
            found.append(Mention(kind, (*owner, name)))
        if kind in OF_GLOBALS or kind in OF_CLOSURES:
            owner = (name,)
        else:
            owner = (*owner, name) if owner and kind in OF_ATTRIBUTES else ()
    return tuple(found)
