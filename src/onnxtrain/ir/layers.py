"""Layers of a graph that are alike: which stand in it, and which it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

KEPT = 4  # of a row of layers: the first three and the last
MODEL, COPIED, LAST = 1, 2, 3  # of these the one that is compared, the one that is copied, the one that ends the row


class NotRepeatedError(Exception):
    """The layers of a short graph are not alike any more, so that it does not tell what a longer one is."""


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

    def further(self, names: frozenset[str], by: int) -> frozenset[str]:
        """The parameters that a value depends on that is so many layers further than another.

        Args:
            names: what the other one depends on in a short graph: all that a layer is given depends on, and some of
                its own layer.
            by: how many layers it is further.
        """
        at = {name: place for name in names if (place := self.place(name)) is not None}
        end = max((place for place, _ in at.values()), default=0)
        if end == LAST:
            return frozenset(whole_names(sorted(names), self))
        if not by:
            return names
        last, given = ({rest for place, rest in at.values() if place == p} for p in (end, max(end - 1, 0)))
        found = {name for name in names if name not in at or at[name][0] < end}
        found |= {self.name(end + n, rest) for n in range(by) for rest in given}
        return frozenset(found | {self.name(end + by, rest) for rest in last})

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


def whole_names(names: Iterable[str], layers: Layers) -> tuple[str, ...]:
    """Names of a short graph's inputs with those of the missing layers, which follow on their like, layer by layer."""
    found: list[str] = []
    block: list[str] = []
    for name in (*names, ""):
        place = layers.place(name)
        if place is not None and place[0] == COPIED:
            block.append(place[1])
        elif block:
            found += [layers.name(COPIED + c, rest) for c in range(1, layers.missing + 1) for rest in block]
            block = []
        found += [name] if name else []
    return tuple(found)


def short_names(names: Sequence[str], layers: Sequence[Layers]) -> tuple[str, ...]:
    """Names of a whole graph's inputs without those of the layers that a short one does not have.

    Raises:
        NotRepeatedError: not all layers have the same of them.
    """
    found = tuple(n for n in names if not any(row.is_missing(n) for row in layers))
    again = found
    for row in layers:
        again = whole_names(again, row)
    if {*again} != {*names}:
        raise NotRepeatedError("not all layers are trained alike")
    return found
