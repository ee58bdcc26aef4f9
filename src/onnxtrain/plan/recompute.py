"""Values that the backward pass computes again, or fetches from elsewhere, rather than keeps: which, in what order."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphError, ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.concrete import bytes_of, size_of
from onnxtrain.ir.graphs import DOMAIN, Plan, TrainingGraph, is_backward
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan.formulas import as_dim, count_of
from onnxtrain.plan.lifetimes import owners

_MOST = 64  # nodes that are computed again for one value
_SHARE = 100_000  # of all that could be computed again: a smaller value is not worth it
_MOMENT = 1e-9  # seconds
_WORSE = 8  # times as much time for a byte as running the whole forward pass again takes
_SLACK = 4  # times the bytes of a value that others may have, which are there earlier because of it
# Operations and bytes in a second, and seconds to draw a random number: their ratio counts.
_RATES = {"cpu": (5e10, 1e10, 5e-9), "accelerator": (1e14, 1e12, 1e-12)}
_LINKS = {"cpu": 1e9, "accelerator": 2e10}  # bytes in a second to a file, or to the memory of the host
_BESIDE = 0.05  # of the time of a transfer that is hidden by computation: it takes bandwidth


@dataclasses.dataclass(frozen=True)
class Choice:
    """Saved values that share one memory, as they are computed again, or fetched from elsewhere.

    Args:
        dropped: their names.
        kept: names of values that are saved instead.
        made: what the operators that run again give.
        at: the place in the backward pass where they do, or where fetching begins.
        gain: bytes that are no longer saved.
        seconds: an estimate of the time.
        moved: the value whose memory waits elsewhere; None where nothing does.
    """

    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    made: tuple[ir.Value, ...]
    at: int
    gain: int
    seconds: float
    moved: ir.Value | None = None

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The operators that run again, in order."""
        return makers(self.made)

    @property
    def worth(self) -> float:
        """Bytes for a second."""
        return self.gain / (self.seconds + _MOMENT)

    @property
    def cluster(self) -> str:
        """The operators, each followed by a plus: ``Linear+Gelu+``."""
        return "".join(f"{n.op_type}+" for n in self.nodes)


@dataclasses.dataclass(frozen=True)
class Look:
    """What it takes to compute values again.

    Args:
        members: the values.
        made: what runs again gives.
        extra: what is saved for it that was not.
        at: the place in the backward pass where it does.
        earlier: values that are computed again anyway, but not as early.
    """

    members: Sequence[ir.Value]
    made: Collection[ir.Value]
    extra: Collection[ir.Value]
    at: int
    earlier: frozenset[ir.Value]


def anything(node: ir.Node) -> bool:
    """Whether a node may run again: each that can."""
    return True


class Search:
    """The search for what to compute again or to fetch, most bytes for the time that it takes first.

    Args:
        training: the graph.
        plan: made of it.
        sizes: of named dimensions.
        device: where it runs.
        draws_again: whether what runs it can draw a mask of dropout a second time.
        offloads: whether values may wait elsewhere.
    """

    def __init__(
        self,
        training: TrainingGraph,
        plan: Plan,
        sizes: Mapping[str, int],
        device: str,
        draws_again: bool = False,
        offloads: bool = False,
    ) -> None:
        self.sizes, self.draws_again = sizes, draws_again
        kind = "cpu" if device == "cpu" else "accelerator"
        self.flops, self.bandwidth, self.draw = _RATES[kind]
        graph = training.model.graph
        self.forward = [n for n in graph if not is_backward(n)]
        self.order = {n: i for i, n in enumerate(self.forward)}
        self.owners = owners(self.forward)
        self.named = named = {str(v.name): v for v in (*graph.inputs, *(v for n in self.forward for v in n.outputs))}
        visible = {*training.signature.outputs, *training.signature.buffer_updates.values()}
        held = {self.owner(named[n]) for n in visible if n in named}
        saved = [named[n] for n in plan.saved if n in named]
        self.kept = set(saved)
        self.groups: dict[ir.Value, list[ir.Value]] = {}
        for value in saved:  # in order: of two choices that are as good the same is taken each time
            owner = self.owner(value)
            node = owner.producer()
            again = node in self.order and (self._can_run_again(owner, self.kept) or (offloads and _is_floating(owner)))
            if again and owner not in held and self.size(owner):
                self.groups.setdefault(owner, []).append(value)
        least = sum(map(self.size, self.groups)) // _SHARE
        self.groups = {owner: found for owner, found in self.groups.items() if self.size(owner) > least}
        self._held = set(map(self.owner, self.kept))
        self.slack = 0  # how many times what is gained may be there earlier
        self.dropped: set[ir.Value] = set()
        self.at: dict[ir.Value, int] = {}  # of what is computed again for an earlier choice, when
        self._backward = [n for n in graph if is_backward(n)]
        self.read = {v: i for i, n in reversed(list(enumerate(self._backward))) for v in n.inputs if v is not None}
        self._link = _LINKS[kind] if offloads else 0.0
        self._hidden = sum(map(self._seconds_of, self.forward)) if offloads and kind != "cpu" else 0.0
        self._moved: set[ir.Value] = set()

    def owner(self, value: ir.Value) -> ir.Value:
        """The value whose memory a value has."""
        return self.owners.get(value, value)

    def run(self) -> Iterator[Choice]:
        """One value after the other, then those together that are worth it only so; what takes long comes later.

        Each choice is meant together with those before it.

        At last come values for which others have to be there earlier: at a place where less is in use than at the peak.
        """
        whole = sum(map(self.size, self.groups)) / (sum(map(self._seconds_of, self.forward)) + _MOMENT)
        for least, self.slack in ((whole / _WORSE, 0), (0.0, 0), (0.0, _SLACK)):
            yield from self._by_worth([(owner,) for owner in self._in_order(self.groups)], least)
            together: dict[frozenset[ir.Value], list[ir.Value]] = {}
            for owner in self._in_order(self.groups):
                if found := self.look((owner,), deep=True):
                    together.setdefault(found.earlier, []).append(owner)
            yield from self._by_worth([tuple(owners) for owners in together.values() if len(owners) > 1], least)

    def _by_worth(self, candidates: Iterable[tuple[ir.Value, ...]], least: float) -> Iterator[Choice]:
        ticket = itertools.count()
        found = ((owners, self._best(owners)) for owners in candidates)
        heap = [(-choice.worth, next(ticket), owners) for owners, choice in found if choice]
        heapq.heapify(heap)
        while heap:
            worth, at, owners = heapq.heappop(heap)
            choice = self._best(owners)
            if choice is None or choice.worth < least:
                continue
            if heap and choice.worth < min(-worth, -heap[0][0]):
                heapq.heappush(heap, (-choice.worth, at, owners))
                continue
            self._take(owners, choice)
            yield choice

    def _in_order(self, owners: Iterable[ir.Value]) -> list[ir.Value]:
        return sorted(owners, key=lambda v: self.order[v.producer()])  # type: ignore[index]

    def _take(self, owners: Iterable[ir.Value], choice: Choice) -> None:
        for owner in owners:
            self.kept.difference_update(self.groups.pop(owner))
            self._held.discard(owner)
            self.dropped.add(owner)
        self.at.update(dict.fromkeys(choice.made, choice.at))
        if choice.moved is not None:
            self._moved.update(owners)
            self._hidden = max(0.0, self._hidden - sum(map(self.size, owners)) / self._link)
            self.at.update(dict.fromkeys(owners, choice.at))
        for value in itertools.chain.from_iterable(map(operands, choice.made)):
            self.read[value] = min(choice.at, self.read.get(value, choice.at))
            if value in self._moved:
                self.at[value] = min(choice.at, self.at[value])
        kept = [self.named[name] for name in choice.kept]
        self.kept.update(kept)
        self._held.update(map(self.owner, kept))

    def _best(self, owners: tuple[ir.Value, ...]) -> Choice | None:
        """The best of computing all again, of saving what an expensive operator gave, and of moving it elsewhere."""
        found = [self.choice(owners, look) for look in (self.look(owners, deep) for deep in (False, True)) if look]
        found += [self._elsewhere(owners[0])] if self._link and len(owners) == 1 else []
        return max(filter(None, found), key=lambda c: c.worth, default=None)

    def _elsewhere(self, owner: ir.Value) -> Choice | None:
        """The memory of a value elsewhere until it is read; None where what else is saved of it is not a mere view."""
        members = self.groups[owner]
        views = {v for member in members for v in views_of(member, owner)}
        beside = {x for v in views for x in operands(v)} - {owner} - views
        if not owner.name or not _is_floating(owner) or not beside <= self.kept:
            return None
        seconds = self.size(owner) / self._link
        at, lead = min(self.read[v] for v in members), 0.0
        while self._hidden and at > 0 and lead < seconds:
            at -= 1
            lead += self._seconds_of(self._backward[at])
        shown = max(0.0, seconds - self._hidden) + (max(0.0, seconds - lead) if self._hidden else seconds)
        made = tuple(sorted(views, key=lambda v: self.order[v.producer()]))  # type: ignore[index]
        names = tuple(sorted(str(v.name) for v in members))
        return Choice(names, (), made, at, self.size(owner), shown + _BESIDE * seconds, owner)

    def choice(self, owners: tuple[ir.Value, ...], look: Look) -> Choice | None:
        """What was looked at as a choice; None where nothing is gained."""
        lost = {self.owner(v) for v in look.extra} - self._held
        gain = sum(map(self.size, owners)) - sum(map(self.size, lost))
        earlier = sum(map(self.size, look.earlier))
        if not self.slack:
            gain -= earlier
        if gain <= 0 or earlier > max(self.slack, 1) * sum(map(self.size, owners)):
            return None
        made = tuple(sorted(look.made, key=lambda v: (self.order[v.producer()], v.index() or 0)))  # type: ignore[index]
        dropped, kept = (tuple(sorted(str(v.name) for v in found)) for found in (look.members, look.extra))
        seconds = self._seconds([v for v in made if v not in self.at])
        return Choice(dropped, kept, made, look.at, gain, seconds)

    def look(
        self,
        owners: tuple[ir.Value, ...],
        deep: bool,
        may_run: Callable[[ir.Node], bool] = anything,
        most: int = _MOST,
    ) -> Look | None:
        """What has to run again for all values that share the memory of some; None where it cannot, or is too much.

        Args:
            owners: the values whose memory it is.
            deep: also what is expensive runs again; else what it gave is saved instead.
            may_run: which nodes may run again; what the others gave is saved instead.
            most: how many nodes may run again.
        """
        members = [v for owner in owners for v in self.groups[owner]]
        at = min(self.read[v] for v in members)
        kept, made, extra = self.kept.difference(members), dict[ir.Value, None](), dict[ir.Value, None]()
        fetched: set[ir.Value] = set()
        waiting = list(members)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value in kept or node is None or value in made or self.at.get(value, at + 1) <= at or value in extra:
                continue
            if value in self._moved:
                fetched.add(value)
                continue
            is_cheap = deep or value in members or value in self.at or Trait.EXPENSIVE not in traits_of(node)
            if not self._can_run_again(value, kept) or not is_cheap or not may_run(node):
                if value in members or self.owner(value) in owners:
                    return None
                extra[value] = None
                continue
            made.update(dict.fromkeys(made_with(value)))
            if len(made) > most and len(makers(made)) > most:
                return None
            waiting += operands(value)
        earlier = {self.owner(v) for v in (*made, *fetched) if v in self.at} & self.dropped
        return Look(members, made, extra, at, frozenset(earlier))

    def size(self, value: ir.Value) -> int:
        """The bytes of a value; none where they are not known."""
        return 0 if shapes.data_of(value) is not None else bytes_of(value, self.sizes) or 0

    def _can_run_again(self, value: ir.Value, kept: Collection[ir.Value]) -> bool:
        """Whether a value's node gives the same again: the mask of dropout has to be kept, or be drawn again."""
        node = value.producer()
        if node is None or not draws_mask(node):
            return node is not None and gives_the_same(node)
        return self.draws_again or (value is node.outputs[0] and node.outputs[1] in kept)

    def _seconds(self, made: Sequence[ir.Value]) -> float:
        masks = [v for v in made if _is_mask(v)]  # a byte for each number
        others = makers(v for v in made if not _is_mask(v))
        return sum(map(self.size, masks)) * self.draw + sum(map(self._seconds_of, others))

    def _seconds_of(self, node: ir.Node) -> float:
        if node.outputs[0] in self.owners:
            return 0.0
        moved = sum(self.size(v) for v in (*operands(node.outputs[0]), *node.outputs))
        try:
            count = size_of(as_dim(count_of(node)), self.sizes) if Trait.EXPENSIVE in traits_of(node) else 0
        except (GraphError, ShapeError, KeyError):
            count = 0
        return moved / self.bandwidth + count / self.flops


def makers(values: Iterable[ir.Value]) -> tuple[ir.Node, ...]:
    """The nodes that make values, each once."""
    return tuple(dict.fromkeys(n for v in values if (n := v.producer()) is not None))


def made_with(value: ir.Value) -> Sequence[ir.Value]:
    """What is computed where a value is computed again: all that its node gives; of dropout that value alone."""
    node = value.producer()
    return (value,) if node is None or draws_mask(node) else node.outputs


def operands(value: ir.Value) -> list[ir.Value]:
    """What is read beside sizes where a value is computed again: for what dropout gives also the mask that was drawn.

    A mask is drawn from the state that the generator had.
    """
    node = value.producer()
    read = [] if node is None else [v for v in node.inputs if v is not None and shapes.data_of(v) is None]
    if node is None or not draws_mask(node):
        return read
    return read[1:2] if _is_mask(value) else [read[0], node.outputs[1], read[1]]


def views_of(value: ir.Value, owner: ir.Value) -> Iterator[ir.Value]:
    """A value and those that it is a view of, up to that whose memory it is, which is not among them."""
    while value is not owner:
        yield value
        value = value.producer().inputs[0]  # type: ignore[union-attr, assignment]


def gives_the_same(node: ir.Node) -> bool:
    """Whether a node gives the same whenever it runs, and does nothing else."""
    return not (Trait.RANDOM | Trait.EFFECT) & traits_of(node) and not bodies_of(node)


def draws_mask(node: ir.Node) -> bool:
    """Whether a node is dropout that gives its mask, and is known to drop."""
    if (node.domain, node.op_type) not in (("", "Dropout"), (DOMAIN, "PackedDropout")):
        return False
    has_ratio = len(node.inputs) > 1 and node.inputs[1] is not None
    is_known = node.domain == DOMAIN or (len(node.inputs) > 2 and shapes.constant_of(node.inputs[2]) is not None)
    return len(node.outputs) == 2 and has_ratio and is_known and Trait.RANDOM in traits_of(node)


def _is_floating(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_mask(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and draws_mask(node) and value is node.outputs[1]
