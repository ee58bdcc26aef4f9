"""Sets of rows: what says that a row is needed, and the graph that computes which ones are, before anything else runs.

A set is a union of *reasons*. Each is evaluated at run time from the user's inputs alone, as one boolean for each row
of a (batch, tokens) pair, so nothing is assumed about how masks and labels are made.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import onnx_ir as ir
import sympy

from onnxtrain.errors import GraphError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.shapes import Dim
from onnxtrain.optimize.rows.attention import HIDDEN, Attention
from onnxtrain.optimize.rows.passages import Layout

Value = ir.Value
Space: TypeAlias = tuple[Dim, Dim]  # batch and tokens


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Rows whose label is not ignored; ``name`` is the input that the labels come from."""

    labels: str
    ignored: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} != {self.ignored}"


@dataclasses.dataclass(frozen=True)
class Positions:
    """The tokens of a slice or one token of each sequence: of every row, or of the rows of a set of what it gives."""

    space: Space
    start: int
    stop: int
    inner: RowSet | None = None

    def __str__(self) -> str:
        stop = "" if self.stop > 2**31 else self.stop
        place = str(self.start) if self.stop == self.start + 1 else f"{self.start or ''}:{stop}"
        return f"token {place}" if self.inner is None else f"token {place} where {text_of(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Listed:
    """One token of each sequence, its place computed from the input ``name``."""

    space: Space
    places: str
    name: str

    def __str__(self) -> str:
        return f"one token, found by {self.name}"


@dataclasses.dataclass(frozen=True)
class NonZero:
    """Rows that are multiplied by something else than zero, or that a condition chooses; by the input ``name``.

    The space may be one merged axis.
    """

    space: tuple[Dim, ...]
    factor: str
    name: str
    inverted: bool = False

    def __str__(self) -> str:
        return f"{'not ' if self.inverted else ''}chosen by {self.name}"


@dataclasses.dataclass(frozen=True)
class Seen:
    """Keys that a query sees: one of a set, any one where there is none."""

    attention: str
    queries: RowSet | None = None

    def __str__(self) -> str:
        by = "some token" if self.queries is None else f"a row where {text_of(self.queries)}"
        return f"{by} attends to it"


@dataclasses.dataclass(frozen=True)
class Reachable:
    """Rows of a set, those that they attend to, those that these attend to, and so on."""

    space: Space
    start: RowSet

    def __str__(self) -> str:
        return f"{text_of(self.start)}, or such a row attends to it"


Reason: TypeAlias = Labelled | Positions | Listed | NonZero | Seen | Reachable
RowSet: TypeAlias = frozenset[Reason]


def text_of(rows: RowSet) -> str:
    """A set in words."""
    return " or ".join(sorted(map(str, rows)))


def is_by_attention(rows: RowSet) -> bool:
    """Whether attention is among what says that a row of the set is needed: what it leaves out is padding."""
    return any(isinstance(r, Seen | Reachable) for r in rows)


def labels_of(rows: RowSet) -> list[Labelled]:
    """The labels among what says that a row of the set is needed."""
    return sorted((r for r in rows if isinstance(r, Labelled)), key=str)


def union(a: RowSet, b: RowSet) -> RowSet:
    """Rows of either; a set that lies in what is reachable from it is not named twice."""
    reached = [r for r in a | b if isinstance(r, Reachable)]
    spaces = {r.space for r in reached}
    merged = {Reachable(s, frozenset().union(*(r.start for r in reached if r.space == s))) for s in spaces}
    inside = frozenset().union(*(r.start for r in merged)) if merged else frozenset()
    rest = {r for r in a | b if not isinstance(r, Reachable) and r not in inside}
    return frozenset(merged | rest)


def without_reached(rows: RowSet, space: Space) -> RowSet:
    """A set with what is reachable from it in the space left out: the reasons it starts from."""
    found: RowSet = frozenset()
    for reason in rows:
        inside = isinstance(reason, Reachable) and reason.space == space
        found = union(found, reason.start if inside else frozenset({reason}))  # type: ignore[union-attr]
    return found


def is_within(inner: RowSet, outer: RowSet) -> bool:
    """Whether every row of a set is known to be in another."""
    started = frozenset().union(*(r.start for r in outer if isinstance(r, Reachable)))
    return all(r in outer or r in started or (isinstance(r, Reachable) and _reaches(r, outer)) for r in inner)


def _reaches(inner: Reachable, outer: RowSet) -> bool:
    return any(isinstance(r, Reachable) and r.space == inner.space and inner.start <= r.start for r in outer)


class Sizes:
    """Dimensions as values of a graph, taken from the shapes of its inputs."""

    def __init__(self, graph: ir.Graph) -> None:
        self.places: dict[str, tuple[Value, int]] = {}
        self._known: dict[Dim, bool] = {}
        for value in graph.inputs:
            for axis, dim in enumerate(shapes.dims_of(value) or ()):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim.value.isidentifier():
                    self.places.setdefault(dim.value, (value, axis))

    def knows(self, dim: Dim) -> bool:
        """Whether a dimension can be computed: a number, or sums and products of dimensions of inputs."""
        if dim not in self._known:
            self._known[dim] = isinstance(dim, int) or self._is_known(shapes.as_expression(dim))
        return self._known[dim]

    def _is_known(self, expression: sympy.Expr) -> bool:
        names = {str(s) for s in expression.free_symbols}
        parts = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul)
        return names <= set(self.places) and all(isinstance(e, parts) for e in sympy.preorder_traversal(expression))

    def value(self, op: Builder, dim: Dim) -> Value:
        """A dimension as an int64 vector of one element.

        Raises:
            GraphError: the dimension is not one of ``knows``.
        """
        if isinstance(dim, int):
            return op.ints(dim)
        if not self.knows(dim):
            raise GraphError(f"the size {dim} cannot be computed from the inputs' shapes")
        return self._value(op, shapes.as_expression(dim))

    def _value(self, op: Builder, expression: Any) -> Value:
        if isinstance(expression, sympy.Integer):
            return op.ints(int(expression))
        if isinstance(expression, sympy.Symbol):
            value, axis = self.places[str(expression)]
            return op.size(value, axis)
        parts = [self._value(op, e) for e in expression.args]
        total = parts[0]
        for part in parts[1:]:
            total = op.Add(total, part) if isinstance(expression, sympy.Add) else op.Mul(total, part)
        return total

    def vector(self, op: Builder, *dims: Dim) -> Value:
        """Dimensions as one int64 vector."""
        if all(isinstance(d, int) for d in dims):
            return op.ints(*dims)  # type: ignore[arg-type]
        return op.Concat(*(self.value(op, d) for d in dims), axis=0)


class Evaluator:
    """Adds to a copy of the forward graph the nodes that evaluate sets.

    Args:
        graph: the copy; nodes are appended.
        attentions: the attentions of the original, whose masks are found by name.
    """

    def __init__(self, graph: ir.Graph, attentions: list[Attention]) -> None:
        self.op, self.sizes = Builder(graph), Sizes(graph)
        self.named = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
        self.named |= {v.name: v for n in graph for v in n.outputs}
        self.attentions = {str(a.output.name): a for a in attentions}
        self._sets: dict[RowSet, Value] = {}
        self._seen: dict[tuple[Any, ...], Value] = {}
        self._totals: dict[tuple[Any, ...], Value] = {}

    def mask(self, rows: RowSet) -> Value:
        """For each row, in one axis, whether it is in the set."""
        if rows not in self._sets:
            parts = [self._flat(self._reason(r)) for r in sorted(rows, key=str)]
            total = parts[0]
            for part in parts[1:]:
                total = self.op.Or(total, part)
            self._sets[rows] = total
        return self._sets[rows]

    def _flat(self, mask: Value) -> Value:
        return mask if shapes.rank(mask) == 1 else self.op.Reshape(mask, self.op.ints(-1))

    def _square(self, rows: RowSet, space: Space) -> Value:
        return self.op.Reshape(self.mask(rows), self.sizes.vector(self.op, *space), allowzero=1)

    def _reason(self, reason: Reason) -> Value:
        op = self.op
        if isinstance(reason, Labelled):
            labels = self.named[reason.labels]
            return op.Not(op.Equal(labels, op.constant(reason.ignored, shapes.dtype_of(labels))))
        if isinstance(reason, Positions):
            return self._positions(reason)
        if isinstance(reason, Listed):
            places = op.Reshape(op.cast(self.named[reason.places], ir.DataType.INT64), op.ints(-1, 1))
            size = self.sizes.value(op, reason.space[1])
            places = op.Where(op.Less(places, op.ints(0)), op.Add(places, size), places)
            return self._expand(op.Equal(places, self._tokens(reason.space)), reason.space)
        if isinstance(reason, NonZero):
            return self._expand(self._factor(reason), reason.space)
        if isinstance(reason, Seen):
            return self._keys(reason)
        squares = [self.seen(a) for a in self._within(reason.space)]
        seen = squares[0]
        for other in squares[1:]:
            seen = op.Or(seen, other)
        return op.ReachableRows(self._square(reason.start, reason.space), self._expand(seen, reason.space, True))

    def _within(self, space: Space) -> list[str]:
        """One attention of a space for each combination of masks."""
        found = {_masks_of(a): name for name, a in reversed(self.attentions.items()) if a.space == (*space, space[1])}
        return sorted(found.values())

    def _tokens(self, space: Space) -> Value:
        size = self.op.Squeeze(self.sizes.value(self.op, space[1]), self.op.ints(0))
        return self.op.Range(self.op.constant(0), size, self.op.constant(1))

    def _expand(self, mask: Value, space: tuple[Dim, ...], square: bool = False) -> Value:
        dims = (*space, space[1]) if square else space
        return self.op.Expand(mask, self.sizes.vector(self.op, *dims))

    def _positions(self, reason: Positions) -> Value:
        op, tokens = self.op, self._tokens(reason.space)
        size = self.sizes.value(op, reason.space[1])

        def bound(place: int) -> Value:
            return op.Add(size, op.ints(place)) if place < 0 else op.ints(min(place, 2**62))

        start = bound(reason.start)
        stop = size if reason.start == -1 and reason.stop == 0 else bound(reason.stop)
        chosen = op.And(op.GreaterOrEqual(tokens, start), op.Less(tokens, stop))
        chosen = self._expand(op.Unsqueeze(chosen, op.ints(0)), reason.space)
        if reason.inner is None:
            return chosen
        # the k-th chosen token of a sequence is token k of what the slice gives
        batch = self.sizes.value(op, reason.space[0])
        inner = op.Reshape(self.mask(reason.inner), op.Concat(batch, op.ints(-1), axis=0))
        width = op.size(inner, 1)
        place = op.Sub(tokens, start)
        inside = op.Min(op.Max(place, op.ints(0)), width)
        beyond = op.Expand(op.constant(False, ir.DataType.BOOL), op.Concat(batch, op.ints(1), axis=0))  # of no token
        return op.And(chosen, op.Gather(op.Concat(inner, beyond, axis=1), inside, axis=1))

    def _factor(self, reason: NonZero) -> Value:
        op, factor = self.op, self.named[reason.factor]
        if shapes.rank(factor) > 2:
            factor = op.Reshape(factor, op.ints(0, 0))
        if shapes.dtype_of(factor) != ir.DataType.BOOL:
            factor = op.Not(op.Equal(factor, op.like(0.0, factor)))
        return op.Not(factor) if reason.inverted else factor

    def _keys(self, reason: Seen) -> Value:
        op, attention = self.op, self.attentions[reason.attention]
        batch, queries, keys = attention.space
        seen = op.Expand(self.seen(reason.attention), self.sizes.vector(op, batch, queries, keys))
        if reason.queries is not None:
            chosen = self._square(reason.queries, (batch, queries))
            seen = op.And(seen, op.Unsqueeze(chosen, op.ints(2)))
        return self.any(seen, 1)

    def any(self, mask: Value, axis: int) -> Value:
        """Whether one along the axis is true."""
        op = self.op
        return op.cast(op.ReduceMax(op.cast(mask, ir.DataType.UINT8), op.ints(axis), keepdims=0), ir.DataType.BOOL)

    def seen(self, name: str) -> Value:
        """Whether a query sees a key, for some head: broadcasts to (batch, queries, keys).

        A key is hidden where its addend is so far below the largest of the query's that its weight is exactly zero.
        A query whose keys are all masked alike sees them all.
        """
        key = _masks_of(self.attentions[name])
        if key not in self._seen:
            op, total = self.op, self._total(name)
            bound = op.Add(self._largest(total), op.like(HIDDEN, total))
            self._seen[key] = self._some_head(op.Not(op.Less(total, bound)))
        return self._seen[key]

    def _total(self, name: str) -> Value:
        """All that masks add to the scores of an attention: broadcasts to (batch, heads, queries, keys)."""
        attention = self.attentions[name]
        key = _masks_of(attention)
        if key not in self._totals:
            self._totals[key] = self._sum(attention)
        return self._totals[key]

    def _sum(self, attention: Attention) -> Value:
        op, total = self.op, self.op.constant([0.0], ir.DataType.FLOAT)  # reductions want an axis
        for mask in attention.masks:
            value = self.named[mask.value.name]
            if mask.is_condition:
                fill = op.like(mask.fill, total)
                total = op.Where(value, *((total, fill) if mask.kind == "kept" else (fill, total)))
            else:
                total = op.cast(total, shapes.dtype_of(value)) if total.dtype != value.dtype else total
                total = (op.Add if mask.kind == "added" else op.Sub)(total, value)
        if attention.causal:
            _, queries, keys = attention.space
            rows, columns = (self._tokens((1, d)) for d in (queries, keys))
            early = op.LessOrEqual(columns, op.Unsqueeze(rows, op.ints(1)))
            total = op.Where(early, total, op.like(float("-inf"), total))
        return total

    def _largest(self, total: Value) -> Value:
        return self.op.ReduceMax(total, self.op.ints(-1), keepdims=1)

    def _some_head(self, mask: Value) -> Value:
        """Without the axis of heads, the third from the end."""
        axis = shapes.rank(mask) - 3
        if axis < 0:
            return mask
        is_one = shapes.known_dims(mask)[axis] == 1
        return self.op.Squeeze(mask, self.op.ints(axis)) if is_one else self.any(mask, axis)

    def blind(self, name: str, queries: RowSet) -> Value | None:
        """Whether all keys of a query of the set are masked, so that attention among packed rows is not exact: what
        they get depends on how the addends round, but where these are minus infinity. None where this cannot be.
        """
        op, attention = self.op, self.attentions[name]
        if not attention.is_plain:
            return None
        batch, rows, _ = attention.space
        largest = self._largest(self._total(name))
        found = op.Less(largest, op.like(HIDDEN, largest))
        if len(attention.nodes) == 1:  # a Softmax of minus infinity alone is not a number, a fused kernel gives zeros
            found = op.And(found, op.Not(op.Equal(largest, op.like(float("-inf"), largest))))
        found = op.Expand(op.Squeeze(self._some_head(found), op.ints(-1)), self.sizes.vector(op, batch, rows))
        return self.any(self._flat(op.And(self._square(queries, (batch, rows)), found)), 0)


def _masks_of(attention: Attention) -> tuple[Any, ...]:
    return (attention.causal, *((m.value.name, m.kind, m.fill) for m in attention.masks))


def layout_space(value: Value, layout: Layout) -> tuple[Dim, ...]:
    """The sizes of a value's row axes."""
    return tuple(shapes.known_dims(value)[a] for a in layout)
