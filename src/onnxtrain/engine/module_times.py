"""The time of a step by module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from onnxtrain.engine.costs import Cost

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer, in the name of a module


@dataclasses.dataclass
class ModuleTime:
    """What the lines of a module cost, forward and backward; layers of one kind that a list holds count as one module.

    Attributes:
        name: as in ``named_modules``, with stars for the numbers of layers: ``encoder.layer.*.attention``.
        kind: its class.
        around: the module that calls it; None for the captured one.
        costs: of its lines, those of the modules that it calls among them.
        names: of the modules that they are, in full.
        within: the modules that it calls.
    """

    name: str
    kind: str
    around: ModuleTime | None
    costs: list[Cost] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)
    within: dict[tuple[str, str], ModuleTime] = dataclasses.field(default_factory=dict)

    @property
    def depth(self) -> int:
        """How many modules are around it, but for the captured one."""
        return 0 if self.around is None or self.around.around is None else self.around.depth + 1

    @property
    def seconds(self) -> float:
        """Of all of its lines."""
        return sum(cost.seconds for cost in self.costs)

    def part(self, name: str, kind: str) -> ModuleTime:
        """A module that it calls."""
        like = _NUMBER.sub("*", name)
        found = self.within.setdefault((like, kind), ModuleTime(like, kind, self))
        found.names.add(name)
        return found

    def walk(self) -> Iterator[ModuleTime]:
        """The modules within, each before those that it calls, in the order of their first call."""
        for part in self.within.values():
            yield part
            yield from part.walk()

    def __str__(self) -> str:
        around = self.around or self
        many = f" ({len(self.names)} of them)" if len(self.names) > max(1, len(around.names)) else ""
        return f"{self.name.removeprefix(f'{around.name}.')}: {self.kind.rpartition('.')[2]}{many}"


def by_module(costs: Sequence[Cost]) -> list[ModuleTime]:
    """What each module cost, before those that it calls, in the order of their first call.

    Args:
        costs: of the lines of a step, in order.
    """
    whole = ModuleTime("", "", None)
    for cost in costs:
        part = whole
        for name, kind in cost.modules:
            part = part.part(name, kind)
            part.costs.append(cost)
    return [*whole.walk()]
