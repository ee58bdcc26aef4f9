"""A generated function, with its source where tracebacks find it."""

from __future__ import annotations

import copy
import itertools
import linecache
import types
from collections.abc import Callable, Mapping
from typing import Any, Self

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

    def value_of(self, line: str) -> str:
        """Name of the first value that a line makes, empty where there is none."""
        targets = line.partition(" = ")[0].split(", ")
        return next((self.values[name] for name in targets if name in self.values), "")

    @property
    def operators(self) -> list[Callable[..., Any]]:
        """The functions of its operators."""
        return [*vars(self.function.__globals__["ops"]).values()]

    def with_operators(self, change: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Self:
        """The same program with other functions for its operators.

        Args:
            change: gives the function that is called for an operator, from its name and its own function.
        """
        assert isinstance(self.function, types.FunctionType)
        made, scope = copy.copy(self), self.function.__globals__
        operators = types.SimpleNamespace(**{name: change(name, f) for name, f in vars(scope["ops"]).items()})
        made.function = types.FunctionType(self.function.__code__, {**scope, "ops": operators})
        return made
