"""A generated function, with its source where tracebacks find it."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping
from typing import Any

FILE = "<onnxtrain "  # how the names of files of programs begin
_SERIAL = itertools.count()


class Program:
    """One generated function and its source.

    Attributes:
        source: the Python text; also what tracebacks show.
        values: for each identifier in it the name of the value.
        function: the compiled function.
    """

    def __init__(self, name: str, source: str, scope: dict[str, Any], values: Mapping[str, str]) -> None:
        self.source, self.values = source, values
        filename = f"{FILE}{name} {next(_SERIAL)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), scope)
        self.function: Callable[..., Any] = scope[name]
