"""What belongs to others, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(*entries: tuple[Any, str, Any]) -> Iterator[None]:
    """Within it attributes have another content.

    Args:
        entries: whose attribute it is, its name, and the content.
    """
    before = [getattr(owner, name, _ABSENT) for owner, name, _ in entries]
    for owner, name, content in entries:
        setattr(owner, name, content)
    try:
        yield
    finally:
        for (owner, name, _), content in zip(entries, before, strict=True):
            if content is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, content)
