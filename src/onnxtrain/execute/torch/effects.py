"""Whether observers of a running step are told: a step that is run again, or beside another, is not observed."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_SILENT = contextvars.ContextVar("onnxtrain_silent", default=False)


def is_silent() -> bool:
    """Whether what runs now must not be observed."""
    return _SILENT.get()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Within it no probe observes: a forward pass that runs a second time, or a copy that runs for comparison."""
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)
