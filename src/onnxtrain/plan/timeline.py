"""What a step has in use from node to node, told anew for each value more that is computed again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.concrete import bytes_of
from onnxtrain.ir.graphs import Plan, TrainingGraph, is_backward
from onnxtrain.plan.lifetimes import course, owners
from onnxtrain.plan.recompute import Choice, operands

Seen = tuple[str, int, int]  # the first value that a line makes, most bytes in use while it runs, and those after it


def pruned(
    training: TrainingGraph, plan: Plan, sizes: Mapping[str, int], chosen: Sequence[Choice], seen: Sequence[Seen] = ()
) -> list[Choice]:
    """Choices without those that raise the peak: what would be computed again early, and then be there until late.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        chosen: what is computed again.
        seen: what a step that computes nothing again has in use, line by line, where that is known.
    """
    begin, rest = _Timeline(training, plan, sizes, seen), list(chosen)
    now = begin.after(rest)
    while tries := [[c for c in rest if c is not one] for one in rest if now.holds_at_peak(one)]:
        best = min(((begin.after(some), some) for some in tries), key=lambda found: found[0].peak)
        if best[0].peak >= now.peak:
            break
        now, rest = best
    return rest


def changes(
    training: TrainingGraph, plan: Plan, sizes: Mapping[str, int], chosen: Sequence[Choice], seen: Sequence[Seen] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes in use at each place of a step with none of some choices, and what each adds to those before it.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        chosen: what is computed again.
        seen: what a step that computes nothing again has in use, line by line, where that is known.

    Returns:
        Arrays ``[places]`` and ``[choices, places]`` of int64.
    """
    timeline = _Timeline(training, plan, sizes, seen)
    found = [timeline.in_use]
    for choice in chosen:
        timeline.take(choice)
        found.append(timeline.in_use)
    return found[0], np.diff(np.stack(found), axis=0)


def peaks(before: np.ndarray, each: np.ndarray) -> list[int]:
    """An estimate of the most bytes in use at once, with none of some choices, with the first, with the first two...

    Args:
        before: bytes in use with none of them, ``[places]``.
        each: what each adds to those before it, ``[choices, places]``.
    """
    return np.vstack([before, each]).cumsum(0).max(1).tolist()


class _Timeline:
    """Bytes in use before and while each node runs, and what copies of other nodes that run before it need at once.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        seen: what is known of the step.
    """

    def __init__(self, training: TrainingGraph, plan: Plan, sizes: Mapping[str, int], seen: Sequence[Seen]) -> None:
        self._sizes = sizes
        graph = training.model.graph
        nodes = list(graph)
        self._owners = owners(n for n in nodes if not is_backward(n))
        self._named = {str(v.name): v for v in (*graph.inputs, *(v for n in nodes for v in n.outputs))}
        moments = course(plan, sizes)
        places = {v.name: i for i, m in enumerate(moments) for v in m.node.outputs if v.name}
        self._places = {n: places[v.name] for n in nodes for v in n.outputs if v.name in places}
        self._before = np.array([m.before for m in moments], dtype=np.int64)
        self._most = np.array([m.most for m in moments], dtype=np.int64)
        self._more = np.zeros(len(moments), dtype=np.int64)  # that a node needs while it runs
        self._measure(seen, places)
        self._copies = np.zeros(len(moments), dtype=np.int64)
        self._backward = self._starts([n for n in nodes if is_backward(n)])
        self._last: dict[bool, dict[ir.Value, int]] = {False: {}, True: {}}  # place at which each pass last reads it
        for node, place in self._places.items():
            for value in (*node.inputs, *node.outputs):
                if value is not None:
                    last, owner = self._last[is_backward(node)], self._owner(value)
                    last[owner] = max(place, last.get(owner, 0))
        self._held: dict[ir.Value, tuple[int, int]] = {}  # by copies: from where, and until where

    def _measure(self, seen: Sequence[Seen], places: Mapping[str, int]) -> None:
        """Take what was measured in place of estimates."""
        before, place = 0, 0
        for name, most, rest in seen:
            at = places.get(name, place)
            made = self._most[at] - self._before[at]
            self._before[place + 1 : at + 1], self._most[place + 1 : at + 1] = before, before
            self._most[at] = max(most, self._most[at] if at == place else 0)
            self._more[at] = max(0, most - max(before + made, rest))
            before, place = rest, at

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return int(self.in_use.max())

    @property
    def in_use(self) -> np.ndarray:
        """Most bytes while each node runs, and before it the copies that it needs."""
        return np.maximum(self._most, self._before + self._copies)

    def after(self, chosen: Iterable[Choice]) -> _Timeline:
        """The same with choices, for itself."""
        other = copy.copy(self)
        other._before, other._most, other._copies = self._before.copy(), self._most.copy(), self._copies.copy()
        other._held = dict(self._held)
        for choice in chosen:
            other.take(choice)
        return other

    def holds_at_peak(self, choice: Choice) -> bool:
        """Whether a copy of one of its values is there where most is in use."""
        place = int(self.in_use.argmax())
        spans = [self._held.get(self._owner(self._named[name])) for name in choice.dropped]
        return any(span[0] <= place <= span[1] for span in spans if span is not None)

    def take(self, choice: Choice) -> None:
        """Compute values again rather than save them."""
        at = self._backward[choice.at]
        for owner in {self._owner(self._named[name]) for name in choice.dropped}:
            end = self._last[True].get(owner, at)
            self._add(-self._bytes(owner), self._last[False].get(owner, at) + 1, end)
            self._hold(owner, at, end)
        for owner in {self._owner(self._named[name]) for name in choice.kept}:
            self._add(self._bytes(owner), self._last[False].get(owner, at) + 1, at)
        made = [self._owner(v) for v in choice.made]
        for owner in {*made, *(self._owner(v) for y in choice.made for v in operands(y))} & self._held.keys():
            self._hold(owner, at, at)
        self._copies[at] = max(self._copies[at], self._needed(choice.made))
        for owner in made:
            self._held.setdefault(owner, (at, at))

    def _needed(self, made: Sequence[ir.Value]) -> int:
        """Most bytes of what copies make only for each other."""
        by_node = [(node, [*values]) for node, values in itertools.groupby(made, ir.Value.producer)]
        last = {self._owner(v): n for n, values in by_node for y in values for v in (y, *operands(y))}
        alive: dict[ir.Value, int] = {}
        most = 0
        for node, values in by_node:
            for owner in map(self._owner, values):
                if owner not in self._held and owner not in alive:
                    alive[owner] = self._bytes(owner)
            most = max(most, sum(alive.values()) + int(self._more[self._places[node]]) if node in self._places else 0)
            alive = {owner: size for owner, size in alive.items() if last[owner] is not node}
        return most

    def _hold(self, owner: ir.Value, start: int, end: int) -> None:
        """A copy is there from one place to another."""
        size = self._bytes(owner)
        first, last = self._held.get(owner, (end + 1, end))
        if start < first:
            self._add(size, start, first - 1)
        if end > last:
            self._add(size, last + 1, end)
        self._held[owner] = min(start, first), max(end, last)

    def _add(self, size: int, start: int, end: int) -> None:
        """So many bytes more before and while the nodes from one place to another run."""
        self._before[start : end + 1] += size
        self._most[start : end + 1] += size

    def _starts(self, nodes: Iterable[ir.Node]) -> list[int]:
        """For each node its place, or that of the next one that has one."""
        found, place = [], len(self._most) - 1
        for node in reversed(list(nodes)):
            place = self._places.get(node, place)
            found.append(place)
        return found[::-1]

    def _owner(self, value: ir.Value) -> ir.Value:
        return self._owners.get(value, value)

    def _bytes(self, value: ir.Value) -> int:
        return 0 if shapes.data_of(value) is not None else bytes_of(value, self._sizes) or 0
