"""Torch's own chatter, kept out of the user's terminal; its errors are raised all the same."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def loggers_at(level: int, *names: str) -> Iterator[None]:
    """Within it these loggers, and those below them that say nothing else, speak from this level on."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
