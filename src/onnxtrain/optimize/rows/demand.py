"""Row liveness: which rows of every value something visible depends on, walking from the outputs to the inputs.

Three things end the need for a row: a loss that ignores its label, attention whose mask hides it as a key, and a
factor that is zero. An operator without a passage needs its inputs whole, and so does whatever is not understood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import ForwardGraph, describe, source_of
from onnxtrain.optimize.rows.attention import Attention, attentions, early_values
from onnxtrain.optimize.rows.indices import chosen_by, compared_labels, places, unexpanded, unviewed
from onnxtrain.optimize.rows.passages import Layout, is_merged, loses_rows, passage_of, row_axes
from onnxtrain.optimize.rows.sets import (
    Labelled,
    Listed,
    NonZero,
    Positions,
    Reachable,
    RowSet,
    Seen,
    Sizes,
    Space,
    layout_space,
    text_of,
    union,
    without_reached,
)

Value = ir.Value


@dataclasses.dataclass(frozen=True)
class Whole:
    """Every row is needed.

    Args:
        reason: what needs them.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Rows:
    """Only some rows are needed.

    Args:
        layout: where the value's rows are.
        rows: which ones.
    """

    layout: Layout
    rows: RowSet


class Liveness:
    """The rows that are needed of every value of a forward graph.

    Args:
        graph: the forward pass.
        differentiable: names of the inputs that receive a gradient.
        shown: outputs that the user may see, with whether rows that no token attends to must be what eager computes
            (True) or may be zeros (False). Other outputs need nothing.

    Attributes:
        early: values known from the user's inputs alone.
        attentions: the attentions found, in order.
        demands: what is needed of each value that something visible depends on; early ones are left out.
        keys: for each attention whose keys are not needed whole, which are.
        losses: for each loss that ignores labels, the rows of its scores that it needs.
        picks: for each node that reads some tokens of its data, which.
    """

    def __init__(self, graph: ForwardGraph, differentiable: Collection[str], shown: Mapping[str, bool]) -> None:
        self.graph, self.shown = graph, dict(shown)
        self.early = early_values(graph, frozenset(differentiable))
        self.attentions = attentions(graph.model.graph, self.early)
        self.sizes = Sizes(graph.model.graph)
        self._inside = {n: a for a in self.attentions for n in a.nodes}
        self._starts: dict[Space, RowSet] = {}
        while True:
            before = dict(self._starts)
            self.demands: dict[Value, Whole | Rows] = {}
            self.keys: dict[Attention, RowSet] = {}
            self.picks: dict[ir.Node, Rows] = {}
            self.losses: dict[ir.Node, Rows] = {}
            self._walk()
            if self._starts == before:
                return

    def rows_of(self, value: Value) -> Rows | None:
        """The rows needed of a value, None where all are."""
        found = self.demands.get(value)
        return found if isinstance(found, Rows) else None

    def source(self, value: Value) -> str:
        """The user's input that an early value is computed from; its own name where there are several, or none."""
        users = set(self.graph.signature.user_inputs)
        found: dict[str, None] = {}
        todo, seen = [value], {value}
        while todo:
            one = todo.pop()
            node = one.producer()
            if one.name in users:
                found[str(one.name)] = None
            more = [] if node is None or node.op_type in ("Shape", "Size") else node.inputs
            todo += [v for v in more if v is not None and v not in seen]
            seen.update(v for v in more if v is not None)
        return next(iter(found)) if len(found) == 1 else str(value.name)

    def _walk(self) -> None:
        graph, signature = self.graph.model.graph, self.graph.signature
        updates = set(signature.buffer_updates.values())
        for value in graph.outputs:
            if value.name in updates:
                self._need(value, Whole("it is the new content of a buffer"))
            if value.name in self.shown:
                self._need(value, self._visible(value, self.shown[str(value.name)]))
        for node in reversed(list(graph)):
            self._pass(node)

    def _visible(self, value: Value, strict: bool) -> Whole | Rows:
        """What is needed of an output: where it may be, only rows that some token attends to."""
        why = Whole(f"{value.name} is an output of the module")
        if strict or shapes.dims_of(value) is None or shapes.rank(value) < 3 or not self._is_floating(value):
            return why
        batch, tokens = layout_space(value, (0, 1))
        space = (batch, tokens)
        every = self._among(space)
        if not every or not all(map(_hides, every)) or not self._can_size((0, 1), value):
            return why
        distinct = {(a.causal, a.masks): str(a.output.name) for a in every}
        return Rows((0, 1), self._reachable(space, frozenset(Seen(name) for name in distinct.values())))

    def _is_floating(self, value: Value) -> bool:
        return value.dtype is not None and value.dtype.is_floating_point()

    def _need(self, value: Value | None, demand: Whole | Rows) -> None:
        if value is None or value in self.early:
            return
        known = self.demands.get(value)
        if isinstance(known, Whole):
            return
        if isinstance(demand, Rows) and not self._can_size(demand.layout, value):
            demand = Whole("its size is not known from the inputs' sizes")
        if isinstance(known, Rows) and isinstance(demand, Rows):
            if known.layout == demand.layout:
                demand = Rows(known.layout, union(known.rows, demand.rows))
            else:
                demand = Whole("its rows are asked for along different axes")
        self.demands[value] = demand

    def _can_size(self, layout: Layout, value: Value) -> bool:
        return all(self.sizes.knows(d) for d in layout_space(value, layout))

    def _pass(self, node: ir.Node) -> None:
        """From what is needed of a node's outputs to what is needed of its inputs."""
        attention = self._inside.get(node)
        if attention is not None:
            if node is attention.nodes[-1] and attention.output in self.demands:
                self._attend(attention)
            return
        found = [self.demands[v] for v in node.outputs if v in self.demands]
        if not found or (node.domain == "" and node.op_type in ("Shape", "Size")):
            return  # a size depends on no content
        whole = next((d for d in found if isinstance(d, Whole)), None)
        if whole is None and self._selects(node):
            return  # rather one token of each sequence than all tokens of some sequences
        if whole is None:
            whole = self._through(node, [d for d in found if isinstance(d, Rows)])
        if whole is not None and not self._ends(node):
            for value in node.inputs:
                self._need(value, Whole(_who(node)) if value is not None and loses_rows(value, node) else whole)

    def _selects(self, node: ir.Node) -> bool:
        """Whether a node, of whose output some sequences are needed, reads some tokens of each."""
        demand = self.demands.get(node.outputs[0])
        is_selection = node.domain == "" and node.op_type in ("Gather", "GatherND")
        return is_selection and isinstance(demand, Rows) and demand.layout == (0,) and self._ends(node)

    def _through(self, node: ir.Node, found: list[Rows]) -> Whole | None:
        """Rows pass through a node; what it needs where they do not."""
        rows = found[0].rows
        for other in found[1:]:
            rows = union(rows, other.rows)
        passage = passage_of(node, found[0].layout) if len({d.layout for d in found}) == 1 else None
        if passage is None:
            return Whole(_who(node))
        for value, operand in zip(node.inputs, passage.operands, strict=True):
            if value is None or operand is None:
                continue
            if operand.has_rows:
                self._need(value, Rows(tuple(a for a in operand.layout if a is not None), rows))
            else:
                self._need(value, Whole("it is the same for many rows"))
        return None

    def _ends(self, node: ir.Node) -> bool:
        """Whether a node whose output is needed whole needs only some rows of what it reads, and which."""
        if node.domain:
            return False
        rule = {
            "SoftmaxCrossEntropyLoss": self._ends_at_loss,
            "NegativeLogLikelihoodLoss": self._ends_at_loss,
            "Gather": self._ends_at_gather,
            "GatherND": self._ends_at_places,
            "Slice": self._ends_at_slice,
            "Mul": self._ends_at_factor,
            "Where": self._ends_at_choice,
        }.get(node.op_type)
        return rule is not None and rule(node)

    def _ends_at_loss(self, node: ir.Node) -> bool:
        """Rows whose label is ignored add nothing to a sum or mean, and have no loss of their own."""
        scores, labels = node.inputs[:2]
        ignored = shapes.attribute(node, "ignore_index")
        if scores is None or labels not in self.early or ignored is None or any(o.uses() for o in node.outputs[1:]):
            return False
        if shapes.rank(scores) not in (2, 3):
            return False
        layout = (0,) if shapes.rank(scores) == 2 else (0, 2)
        if len(layout) == 1 and not is_merged(shapes.known_dims(scores)[0]):
            return False  # one label for each sample
        assert labels is not None
        self.losses[node] = Rows(layout, frozenset({self._labelled(labels, ignored)}))
        self._need(scores, self.losses[node])
        self._need(shapes.operand(node, 2), Whole("it weighs classes"))
        return True

    def _labelled(self, labels: Value, ignored: int) -> Labelled:
        labels = unviewed(labels)
        return Labelled(str(labels.name), ignored, self.source(labels))

    def _ends_at_gather(self, node: ir.Node) -> bool:
        """One token of each sequence."""
        data, place = node.inputs[0], shapes.constant_of(node.inputs[1])
        if data is None or place is None or place.size != 1:
            return False
        axis = shapes.attribute(node, "axis", 0) % shapes.rank(data)
        space = self._space(data, axis)
        if space is None or shapes.rank(data) < axis + 2:
            return False
        at = int(place.reshape(-1)[0])
        return self._pick(node, data, Rows((0, axis), frozenset({Positions(space, at, at + 1)})))

    def _pick(self, node: ir.Node, data: Value, rows: Rows) -> bool:
        """One row of each sequence."""
        self.picks[node] = rows
        self._need(data, rows)
        return True

    def _space(self, value: Value, axis: int = 1) -> Space | None:
        """The first axis as batch and another as tokens, where their sizes are known at run time."""
        if axis not in (1, 2) or shapes.rank(value) <= axis:
            return None
        batch, tokens = layout_space(value, (0, axis))
        return (batch, tokens) if self.sizes.knows(batch) and self.sizes.knows(tokens) else None

    def _ends_at_places(self, node: ir.Node) -> bool:
        """Tokens at places computed from the inputs: ``x[mask]``, or one of each sequence, ``x[arange(batch), i]``."""
        data, indices = node.inputs
        if data is None or indices is None or indices not in self.early or shapes.rank(data) < 2:
            return False
        mask = None if shapes.attribute(node, "batch_dims", 0) else chosen_by(indices)
        if mask is not None:
            return self._ends_at_chosen(node, data, mask)
        batch_dims, batch = shapes.attribute(node, "batch_dims", 0), shapes.known_dims(data)[0]
        space, found = self._space(data), places(indices, batch_dims, batch)
        if space is None or found is None:
            return False
        return self._pick(node, data, Rows((0, 1), frozenset({Listed(space, str(found.name), self.source(found))})))

    def _ends_at_chosen(self, node: ir.Node, data: Value, mask: Value) -> bool:
        """The tokens of all sequences where a mask is true."""
        layout, dims = tuple(range(shapes.rank(mask))), shapes.known_dims(mask)
        if dims != shapes.known_dims(data)[: len(dims)] or not self._can_size(layout, data):
            return False
        if len(layout) > 2 or (len(layout) == 1 and not is_merged(dims[0])):
            return False
        return self._pick(node, data, Rows(layout, frozenset({self._chosen_by(mask, dims, inverted=False)})))

    def _ends_at_slice(self, node: ir.Node) -> bool:
        """A range of tokens, or those of its rows that are needed."""
        data = node.inputs[0]
        bounds = [shapes.constant_of(shapes.operand(node, i)) for i in (1, 2, 3)]
        steps = shapes.constant_of(shapes.operand(node, 4))
        if data is None or any(b is None or b.size != 1 for b in bounds):
            return False
        start, stop, axis = (int(b.reshape(-1)[0]) for b in bounds if b is not None)
        axis %= shapes.rank(data)
        space = self._space(data, axis)
        if space is None or shapes.rank(data) < axis + 2 or (steps is not None and steps.reshape(-1)[0] != 1):
            return False
        needed = self.rows_of(node.outputs[0])
        inner = needed.rows if needed is not None and needed.layout == (0, axis) else None
        self._need(data, Rows((0, axis), frozenset({Positions(space, start, stop, inner)})))
        return True

    def _ends_at_factor(self, node: ir.Node) -> bool:
        """Rows that are multiplied by zero: pooling that respects a mask."""
        for index in (0, 1):
            factor, other = node.inputs[index], node.inputs[1 - index]
            if factor in self.early and other not in self.early:
                return self._ends_at_mask(node, factor, [other])
        return False

    def _ends_at_choice(self, node: ir.Node) -> bool:
        """Rows that a condition replaces by something known."""
        condition, *branches = node.inputs
        late = [i for i, b in enumerate(branches) if b not in self.early]
        if condition not in self.early or len(late) != 1:
            return False
        return self._ends_at_mask(node, condition, [branches[late[0]]], inverted=late[0] == 1)

    def _ends_at_mask(
        self, node: ir.Node, mask: Value | None, values: Iterable[Value | None], inverted: bool = False
    ) -> bool:
        y = node.outputs[0]
        layout = row_axes(y)
        if mask is None or layout is None or not self._can_size(layout, y):
            return False
        mask, count = unexpanded(mask), len(layout)
        dims, wide = shapes.known_dims(mask), shapes.known_dims(y)
        if len(dims) != len(wide) or dims[:count] != wide[:count] or any(d != 1 for d in dims[count:]):
            return False
        reason = self._chosen_by(mask, layout_space(y, layout), inverted)
        for value in values:
            assert value is not None
            if shapes.dims_of(value) is None or shapes.known_dims(value)[:count] != wide[:count]:
                return False
            self._need(value, Rows(layout, frozenset({reason})))
        return True

    def _chosen_by(self, mask: Value, space: tuple[shapes.Dim, ...], inverted: bool) -> Labelled | NonZero:
        """The rows where a mask is not zero, or is: where it was made of labels, those that have one."""
        compared = compared_labels(mask)
        if compared is not None and compared[2] == inverted:
            return self._labelled(*compared[:2])
        return NonZero(space, str(mask.name), self.source(mask), inverted)

    def _attend(self, attention: Attention) -> None:
        """Queries are needed as the output is; keys and values where such a query sees them."""
        demand = self.demands[attention.output]
        queries = demand.rows if isinstance(demand, Rows) and demand.layout == (0, 2) else None
        who = _who(attention.nodes[-1])
        self._need(attention.query, Whole(who) if queries is None else Rows((0, 2), queries))
        for value in attention.others:
            self._need(value, Whole(who))
        keys = self._keys(attention, queries)
        if keys is not None:
            self.keys[attention] = keys
        self._need(attention.key, Whole(who) if keys is None else Rows(attention.layout_k, keys))
        self._need(attention.value, Whole(who) if keys is None else Rows((0, 2), keys))

    def _keys(self, attention: Attention, queries: RowSet | None) -> RowSet | None:
        """The keys that queries of a set see; among tokens of one sequence, all that are reachable from it."""
        batch, rows, columns = attention.space
        if not all(self.sizes.knows(d) for d in attention.space) or not _hides(attention):
            return None
        if rows != columns:
            return self._reachable((batch, columns), frozenset({Seen(str(attention.output.name), queries)}))
        space = (batch, rows)
        if queries is None or not all(map(_hides, self._among(space))):
            return None
        return self._reachable(space, without_reached(queries, space))

    def _among(self, space: Space) -> list[Attention]:
        """The attentions among the tokens of a space."""
        return [a for a in self.attentions if a.space == (*space, space[1])]

    def _reachable(self, space: Space, rows: RowSet) -> RowSet:
        """All that is reachable from a set, and from the others that start in the space: one set for all layers."""
        among = self._among(space)
        if not among or not all(map(_hides, among)):
            return rows
        self._starts[space] = union(self._starts.get(space, frozenset()), rows)
        return frozenset({Reachable(space, self._starts[space])})


def _hides(attention: Attention) -> bool:
    return bool(attention.masks) or attention.causal


def _who(node: ir.Node) -> str:
    place = source_of(node)
    return f"{describe(node)} reads every row" + (f", {place}" if place else "")


__all__ = ["Liveness", "Rows", "Whole", "text_of"]
