"""What belongs to others, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

ABSENT = object()


@contextlib.contextmanager
def replaced(*entries: tuple[Any, Any, Any]) -> Iterator[None]:
    """Within it attributes, and what dictionaries hold, have another content.

    Args:
        entries: whose attribute it is, its name, and the content; of a dictionary, the key and the content. ``ABSENT``
            takes away what the owner itself has.
    """
    before = [(owner, name, _content(owner, name)) for owner, name, _ in entries]
    for entry in entries:
        _set(*entry)
    try:
        yield
    finally:
        for entry in before:
            _set(*entry)


def _content(owner: Any, name: Any) -> Any:
    """What the owner itself has, as it stands there; not what its class has, nor what a descriptor makes of it."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, ABSENT)


def _set(owner: Any, name: Any, content: Any) -> None:
    if isinstance(owner, dict):
        if content is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = content
    elif content is not ABSENT:
        setattr(owner, name, content)
    elif name in vars(owner):
        delattr(owner, name)


__all__ = ["ABSENT", "replaced"]
