"""When Python looks for garbage: not while a graph is made, whose objects live long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_COLLECTED: dict[str, int] = {}  # how many full collections there had been when objects were last counted as old


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it Python does not look for garbage: after it, once, and only among what was made within."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.collect(0)
            _grow_old()
            gc.enable()


def _grow_old() -> None:
    """Count what was made as old: a graph lives long, and Python would go through all objects to find that out.

    Not twice without a full collection in between, so that none is put off for ever, and not where a program froze
    objects of its own, which this would thaw.
    """
    full = gc.get_stats()[2]["collections"]
    if full != _COLLECTED.get("full") and not gc.get_freeze_count():
        _COLLECTED["full"] = full
        gc.freeze()
        gc.unfreeze()
