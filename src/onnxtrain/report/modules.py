"""The operators of a graph under the modules that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxtrain.report.graphs import Operator


class Part:
    """A module as the report shows it.

    Args:
        name: of the module, as in ``named_modules``; empty for the one that was captured.
        kind: its class.

    Attributes:
        operators: its own, those of the modules that it calls left out.
    """

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.operators: list[Operator] = []
        self._within: dict[str, Part] = {}

    def parts(self) -> Iterator[Part]:
        """The modules that it calls, in the order of their first call."""
        yield from self._within.values()

    def part(self, name: str, kind: str) -> Part:
        """One of the modules that it calls."""
        return self._within.setdefault(name, Part(name, kind))

    def all(self) -> list[Operator]:
        """Its operators, and those of the modules that it calls."""
        return [*self.operators, *(o for part in self.parts() for o in part.all())]


def tree_of(operators: Sequence[Operator]) -> Part:
    """The captured module.

    Args:
        operators: of its graph, in order.
    """
    whole = Part("", "")
    for operator in operators:
        part = whole
        for name, kind in operator.modules:
            part = part.part(name, kind)
        part.operators.append(operator)
    return whole
