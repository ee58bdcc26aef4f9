"""Numbers that graphs have as inputs because they vary: arguments of calls, and attributes that the program sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import (
    Key,
    Path,
    Place,
    Schema,
    can_be_counted,
    count,
    count_no_longer,
    numbers_carried,
    places_of,
)
from onnxtrain.ortmodule.guards import Call, Inspector


@dataclasses.dataclass(frozen=True)
class Taken:
    """Numbers that are inputs of graphs from one call on.

    Args:
        spec: the structure of the call's arguments.
        arguments: their positions among these.
        places: the attributes.
        keys: of the looks at these.
    """

    spec: pytree.TreeSpec
    arguments: frozenset[int] = frozenset()
    places: tuple[Place, ...] = ()
    keys: frozenset[Key] = frozenset()

    def steer(self, path: Path) -> bool:
        """Whether a graph stands on what one of the attributes holds: each value would be a path, and there are few."""
        return not self.keys.isdisjoint(path.exact)


class VaryingNumbers:
    """Which numbers are inputs: from their second value on, unless each value needs a graph.

    Args:
        module: the user's module.

    Attributes:
        arguments: for a structure of arguments, the positions of these.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.arguments: dict[pytree.TreeSpec, frozenset[int]] = {}
        self._fixed: dict[pytree.TreeSpec, frozenset[int]] = {}
        self._steering: set[Place] = set()

    def take(self, call: Call, earlier: Sequence[Call], inspector: Inspector) -> Taken | None:
        """Take the numbers that are others than in an earlier call for inputs; None where there are none.

        Args:
            call: the call.
            earlier: those that graphs were captured for.
            inspector: of the module.
        """
        spec = call.schema.spec
        positions = _others(call.schema, (c.schema for c in earlier)) - self._fixed.get(spec, frozenset())
        if positions:
            self.arguments[spec] = self.arguments.get(spec, frozenset()) | positions
            return Taken(spec, positions)
        alike = (c for c in reversed(earlier) if c.is_but_for_state(call) and c.state != call.state)
        changed = next(filter(None, (_changed(inspector, c.state, call.state) for c in alike)), [])
        places = tuple(places_of(self._module, changed))
        if not self._steering.isdisjoint(places) or not count(self._module, places):
            return None
        inspector.look_again()
        looks = (c.look(self._module) for c in numbers_carried(self._module) if c.place in places)
        return Taken(spec, places=places, keys=frozenset(look.key for look in looks))

    def give_back(self, taken: Taken, inspector: Inspector) -> None:
        """They are no inputs after all, as the call that they were taken for raised."""
        self.arguments[taken.spec] = self.arguments.get(taken.spec, frozenset()) - taken.arguments
        if taken.places:
            count_no_longer(self._module, taken.places)
            inspector.look_again()

    def keep_apart(self, taken: Taken, inspector: Inspector) -> None:
        """Each value has a graph from now on."""
        self.give_back(taken, inspector)
        self._fixed[taken.spec] = self._fixed.get(taken.spec, frozenset()) | taken.arguments
        self._steering |= {*taken.places}


def _others(schema: Schema, earlier: Iterable[Schema]) -> frozenset[int]:
    """Positions of numbers among a call's arguments that had another value in an earlier call of the same structure."""
    now = {i: value for i, value in schema.constants if can_be_counted(value)}
    known = [dict(other.constants) for other in earlier if other.spec == schema.spec]
    return frozenset(i for i, n in now.items() if any(can_be_counted(old := k.get(i)) and old != n for k in known))


def _changed(inspector: Inspector, before: int, now: int) -> list[tuple[Any, str]]:
    """The attributes in which a module is another than before, with their owners; none where not all are numbers."""
    old, new = inspector.found(before), inspector.found(now)
    if old.structure != new.structure or old.rest != new.rest:
        return []
    pairs = zip(inspector.attributes(), old.values, new.values, strict=True)
    found = [(o, n, x, y) for (o, names), xs, ys in pairs for n, x, y in zip(names, xs, ys, strict=True) if x != y]
    return [(o, n) for o, n, _, _ in found] if all(_is_number(x) and _is_number(y) for *_, x, y in found) else []


def _is_number(told: Any) -> bool:
    """Whether what tells a value apart is that of a number that may be an input."""
    return isinstance(told, tuple) and told[0] in (int, float)
