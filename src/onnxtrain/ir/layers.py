"""Layers of a graph that are alike: which stand in it, and which it stands for."""

from __future__ import annotations

import dataclasses

KEPT = 4  # of a row of layers: the first three and the last


@dataclasses.dataclass(frozen=True)
class Layers:
    """A row of layers that differ only in their parameters, of which a short graph has the first three and the last.

    The first and the last meet what is around the row; the two between are what each layer is among its like.

    Args:
        prefix: the path of what holds them, ``encoder.layer``; empty where it is the module itself.
        first: the number of the first one.
        last: the number of the last one.
    """

    prefix: str
    first: int
    last: int

    @property
    def missing(self) -> int:
        """How many of them a short graph does not have."""
        return self.last - self.first + 1 - KEPT

    def place(self, name: str) -> tuple[int, str] | None:
        """Of a parameter or buffer of a short graph, which of its layers has it, 0 to 3, and its name there."""
        index, rest = self._apart(name)
        if index == self.last - self.first:
            return KEPT - 1, rest
        return (index, rest) if 0 <= index < KEPT - 1 else None

    def is_missing(self, name: str) -> bool:
        """Whether a parameter or buffer is of a layer that a short graph does not have."""
        return KEPT - 1 <= self._apart(name)[0] < self.last - self.first

    def _apart(self, name: str) -> tuple[int, str]:
        """Which layer of the row has a parameter or buffer, and its name there; -1 where none does."""
        start = f"{self.prefix}." if self.prefix else ""
        number, _, rest = name.removeprefix(start).partition(".")
        is_within = name.startswith(start) and number.isdecimal() and bool(rest)
        return (int(number) - self.first, rest) if is_within else (-1, "")

    def name(self, place: int, rest: str) -> str:
        """The name of a parameter or buffer of the layer at a place of the whole row."""
        return ".".join(filter(None, (self.prefix, str(self.first + place), rest)))

    @property
    def told(self) -> str:
        """Which layers were not traced, as ``explain`` says it."""
        names = [self.name(place, "") for place in (KEPT - 1, self.last - self.first - 1, KEPT - 2)]
        return "{} to {} were not traced: they are as {}".format(*names)

    def __str__(self) -> str:
        """As the log and ``explain`` name them."""
        return f"{self.name(0, '')} to {self.last}"
