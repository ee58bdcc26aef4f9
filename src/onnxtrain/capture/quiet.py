"""Torch's own chatter, kept out of the user's terminal; its errors are raised all the same."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and no graph printed where capture fails: what goes wrong is raised."""
    loggers = loggers_at(logging.ERROR, "torch._export.non_strict_utils")  # sizes of 1 are constant: we handle that
    failures = loggers_at(logging.CRITICAL, "torch._subclasses.fake_tensor")  # of an example, where another is tried
    stderr = contextlib.redirect_stderr(_WithoutGraphs(sys.stderr))  # type: ignore[type-var]
    with loggers, failures, warnings.catch_warnings(), stderr:
        warnings.simplefilter("ignore")
        yield


class _WithoutGraphs(io.TextIOBase):
    """A stream that passes on everything but the graph that torch.export prints when it fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if "def forward(self" not in text:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
