"""Compute only the rows that are needed: every node with a passage runs over packed rows.

Between nodes of the same set nothing is converted. A packed value is put back into its padded shape, with zeros in
its place where rows were dropped, only where something needs that shape: the other rows are not read, or what is read
of them does not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.layer_slices import weights
from onnxtrain.optimize.rows.attention import Attention, Mask
from onnxtrain.optimize.rows.choice import node_rows
from onnxtrain.optimize.rows.demand import Liveness
from onnxtrain.optimize.rows.passages import Layout, Operand, Passage, passage_of, rest_of
from onnxtrain.optimize.rows.sets import RowSet, is_within, layout_space, text_of

Value = ir.Value


@dataclasses.dataclass(frozen=True)
class Within:
    """The places of a set's rows among those of a larger set."""

    rows: RowSet
    outer: RowSet


@dataclasses.dataclass
class Packed:
    """A forward graph whose rows are packed.

    Args:
        graph: the graph; its signature names the inputs that say which rows.
        inputs: what each of these inputs holds: the rows of a set, or their places within another.
        nodes: how many nodes run over packed rows, by set.
        zeros: outputs that are zeros beside the rows of a set.
    """

    graph: ForwardGraph
    inputs: dict[str, RowSet | Within]
    nodes: dict[RowSet, int]
    zeros: dict[str, RowSet]


def pack(liveness: Liveness, active: Collection[RowSet]) -> Packed:
    """A copy of a forward graph that computes only needed rows.

    Args:
        liveness: what is needed.
        active: the sets to drop rows for; a value whose set is not among them is computed for the rows that are
            reachable from it, where these are, or for all.
    """
    return _Packer(liveness, frozenset(active)).run()


class _Packer:
    """Packs a copy of a graph; nodes of the original are looked up by the names of their outputs."""

    def __init__(self, liveness: Liveness, active: frozenset[RowSet]) -> None:
        source = liveness.graph
        self.liveness, self.active = liveness, active
        self.model = ir.Model(source.model.graph.clone(), ir_version=source.model.ir_version)
        self.graph, self.signature = self.model.graph, source.signature
        self.op = Builder(self.graph)
        self.sizes = type(liveness.sizes)(self.graph)
        self.inputs: dict[str, RowSet | Within] = {}
        self.names: dict[RowSet | Within, Value] = {}
        self.packed: dict[Value, tuple[Layout, RowSet, Value]] = {}
        self.dense: dict[Value, Value] = {}
        self.taken: dict[tuple[object, ...], Value] = {}
        self.everything: dict[tuple[shapes.Dim, ...], Value] = {}
        self.nodes: dict[RowSet, int] = {}
        self.weights = weights(source.model.graph, source.layers)
        originals = source.model.graph
        self.copies = dict(zip(originals, self.graph, strict=True))
        pairs = [*zip(originals.inputs, self.graph.inputs, strict=True)]
        pairs += [(v, self.graph.initializers[str(v.name)]) for v in originals.initializers.values()]
        pairs += [(a, b) for x, y in self.copies.items() for a, b in zip(x.outputs, y.outputs, strict=True)]
        self.copy = dict(pairs)
        self.original = {b: a for a, b in pairs}
        self.ends = {self.copies[a.nodes[-1]]: a for a in liveness.attentions}
        self.inner = {self.copies[n] for a in liveness.attentions for n in a.nodes}

    def run(self) -> Packed:
        """Pack all nodes, put outputs back, and leave out what nothing reads."""
        for node in list(self.graph):
            self.op.before, self.op.metadata = node, dict(node.metadata_props)
            if not self._pack(node):
                self._feed(node)
        self.op.before, self.op.metadata = None, {}
        given = list(self.graph.outputs)
        zeros = {str(v.name): self.packed[v][1] for v in given if v in self.packed}
        outputs = [self._named(v) for v in given]
        self.graph.outputs.clear()
        self.graph.outputs.extend(outputs)
        remove_unread(self.graph)
        signature = dataclasses.replace(self.signature, rows=tuple(self.inputs))
        return Packed(ForwardGraph(self.model, signature, self.liveness.graph.layers), self.inputs, self.nodes, zeros)

    def _named(self, value: Value) -> Value:
        """An output in its padded shape, under its own name."""
        made = self._padded(value)
        if made is not value:
            made.name, value.name = value.name, f"{value.name}_all_rows"
        return made

    def _effective(self, rows: RowSet) -> RowSet | None:
        """The set to compute for: itself, the active one that is reachable from it, or None for all rows."""
        if rows in self.active:
            return rows
        return next((outer for outer in sorted(self.active, key=text_of) if is_within(rows, outer)), None)

    def _pack(self, node: ir.Node) -> bool:
        """Whether a node was replaced by one over packed rows."""
        attention = self.ends.get(node)
        if attention is not None:
            return self._pack_attention(node, attention)
        if node in self.inner:
            return False
        original = self.original[node.outputs[0]].producer()
        found = None if original is None else node_rows(self.liveness, original)
        rows = None if found is None else self._effective(found[1])
        if found is None or rows is None or original is None:
            return False
        passage = passage_of(original, found[0])
        if passage is None:
            return False
        self._replace(node, passage, found[0], rows)
        return True

    def _replace(self, node: ir.Node, passage: Passage, layout: Layout, rows: RowSet) -> None:
        operands = [
            None if x is None or o is None else self._take(x, o, node.outputs[0], layout, rows)
            for x, o in zip(node.inputs, passage.operands, strict=True)
        ]
        before = len(self.graph)
        made = passage.build(self.op, operands)
        for old, new in zip(node.outputs, made, strict=True):
            if len(self.graph) > before and new.producer() is not None and new not in operands:
                new.name = f"{old.name}_rows"
            self.packed[old] = (layout, rows, new)
        self._note(node, rows)

    def _note(self, node: ir.Node, rows: RowSet) -> None:
        original = self.original[node.outputs[0]].producer()
        weight = 1 if original is None else self.weights.get(original, 1)
        self.nodes[rows] = self.nodes.get(rows, 0) + weight

    def _take(self, x: Value, operand: Operand, y: Value, wide: Layout, rows: RowSet) -> Value:
        """An operand over the rows of a set; as it is where it has none."""
        if operand.is_free:
            return self._padded(x)
        if operand.has_rows:
            return self._rows(x, tuple(a for a in operand.layout if a is not None), rows)
        return self._repeated(x, operand, y, wide, rows)

    def _rows(self, x: Value, layout: Layout, rows: RowSet) -> Value:
        """The rows of a value that are in a set."""
        known = self.packed.get(x)
        if known is not None and known[1] == rows:
            return known[2]
        if known is not None and known[0] == layout and is_within(rows, known[1]):
            return self._once((x, rows), lambda: self.op.ShrunkenGather(known[2], self._input(Within(rows, known[1]))))
        return self._once((x, rows, layout), lambda: self._gather(self._padded(x), layout, rows))

    def _once(self, key: tuple[object, ...], make: Callable[[], Value]) -> Value:
        if key not in self.taken:
            self.taken[key] = make()
        return self.taken[key]

    def _gather(self, x: Value, layout: Layout, rows: RowSet) -> Value:
        x = self._leading(x, layout)
        if len(layout) == 1:
            return self.op.ShrunkenGather(x, self._input(rows))
        return self.op.FlattenAndUnpad(x, self._input(rows))

    def _leading(self, x: Value, layout: Layout) -> Value:
        """A value with its row axes first."""
        order = [*layout, *rest_of(x, layout)]
        return x if order == sorted(order) else self.op.Transpose(x, perm=order)

    def _repeated(self, x: Value, operand: Operand, y: Value, wide: Layout, rows: RowSet) -> Value:
        """A value that is the same along one of two row axes, read at the other's place of each row."""
        axis = next(i for i, a in enumerate(operand.layout) if a is not None)
        inner = operand.layout[axis]
        assert inner is not None
        key = (x, rows, "repeated", inner)
        return self._once(key, lambda: self._gather_repeated(self._padded(x), inner, axis, y, wide, rows))

    def _gather_repeated(self, x: Value, inner: int, axis: int, y: Value, wide: Layout, rows: RowSet) -> Value:
        op, shift = self.op, shapes.rank(y) - shapes.rank(x)
        gone = [a - shift for i, a in enumerate(wide) if i != axis and a >= shift]
        order = [inner, *gone, *(a for a in range(shapes.rank(x)) if a != inner and a not in gone)]
        if order != sorted(order):
            x = op.Transpose(x, perm=order)
        if gone:
            x = op.Squeeze(x, op.ints(1))
        width = self.sizes.value(op, layout_space(y, wide)[1])
        places = self._once(
            (rows, "place", axis, str(layout_space(y, wide)[1])),
            lambda: (op.Div if axis == 0 else op.Mod)(self._input(rows), width),
        )
        return op.Gather(x, places, axis=0)

    def _padded(self, x: Value) -> Value:
        """A value in its padded shape, with zeros where rows were dropped."""
        if x in self.packed and x not in self.dense:
            self.dense[x] = self._pad(x, *self.packed[x])
        return self.dense.get(x, x)

    def _pad(self, x: Value, layout: Layout, rows: RowSet, packed: Value) -> Value:
        op, space = self.op, layout_space(x, layout)
        if len(layout) == 1:
            shape = self.sizes.vector(op, 1, *space)
            return op.Squeeze(op.PadAndUnflatten(packed, self._input(rows), shape), op.ints(0))
        made = op.PadAndUnflatten(packed, self._input(rows), self.sizes.vector(op, *space))
        order = [*layout, *rest_of(x, layout)]
        back = [order.index(a) for a in range(len(order))]
        return made if back == sorted(back) else op.Transpose(made, perm=back)

    def _feed(self, node: ir.Node) -> None:
        """A node that is left as it is reads padded values; sizes are taken from the inputs of the graph."""
        if node.domain == "" and node.op_type == "Shape" and node.inputs[0] in self.packed:
            self._measure(node)
            return
        if self._pick(node) or self._pack_loss(node):
            return
        for index, value in enumerate(node.inputs):
            if value is not None and (value in self.packed or value in self.dense):
                node.replace_input_with(index, self._padded(value))

    def _pick(self, node: ir.Node) -> bool:
        """Whether a node that reads some tokens of its data was replaced by these rows of a packed value."""
        original = self.original[node.outputs[0]].producer() if node.outputs else None
        picked = None if original is None else self.liveness.picks.get(original)
        known = None if picked is None else self.packed.get(node.inputs[0])  # type: ignore[arg-type]
        if picked is None or known is None or known[0] != picked.layout or not self._has(picked.rows, known[1]):
            return False
        y, chosen = node.outputs[0], known[2]
        is_counted, is_sized = shapes.rank(y) == shapes.rank(chosen), all(map(self.sizes.knows, shapes.known_dims(y)))
        if not is_counted and not is_sized:
            return False
        if picked.rows != known[1]:
            chosen = self.op.ShrunkenGather(chosen, self._input(Within(picked.rows, known[1])))
        if is_sized:
            shape = self.sizes.vector(self.op, *shapes.known_dims(y))
            self.dense[y] = self.op.Reshape(chosen, shape, allowzero=1)
        else:  # as many as a mask has true elements, which later sizes call by that node's name
            self.dense[y] = self.op.Identity(chosen)
            self.dense[y].shape = y.shape
        return True

    def _has(self, rows: RowSet, outer: RowSet) -> bool:
        """Whether the places of a set's rows within another are known."""
        return rows == outer or (rows in self.active and is_within(rows, outer))

    def _pack_loss(self, node: ir.Node) -> bool:
        """Whether the scores and labels of a loss were replaced by those of packed rows: it ignores the others."""
        original = self.original[node.outputs[0]].producer() if node.outputs else None
        needed = None if original is None else self.liveness.losses.get(original)
        known = None if needed is None else self.packed.get(node.inputs[0])  # type: ignore[arg-type]
        labels = node.inputs[1] if len(node.inputs) > 1 else None
        if original is None or needed is None or known is None or labels is None or known[0] != needed.layout:
            return False
        places = (0, 1) if len(needed.layout) == 2 else (0,)
        passage = passage_of(original, places)
        if passage is not None:  # a loss for each label: zeros where it is ignored
            self._replace(node, passage, places, known[1])
            return True
        node.replace_input_with(0, known[2])
        node.replace_input_with(1, self._rows(labels, places, known[1]))
        return True

    def _measure(self, node: ir.Node) -> None:
        x = node.inputs[0]
        assert x is not None
        rank = shapes.rank(x)
        start, end = shapes.attribute(node, "start", 0), shapes.attribute(node, "end", rank)
        dims = shapes.known_dims(x)[start:end]
        if all(self.sizes.knows(d) for d in dims):
            self.dense[node.outputs[0]] = self.sizes.vector(self.op, *dims)
        else:
            node.replace_input_with(0, self._padded(x))

    def _input(self, rows: RowSet | Within) -> Value:
        """The graph input that says which rows, or where they are within a larger set."""
        if rows not in self.names:
            inner = self._count(rows.rows) if isinstance(rows, Within) else ""
            name, taken = f"rows_{len(self.inputs)}", {v.name for v in self.original}
            while name in taken:
                name += "_"
            size = inner or f"{name}_count"
            value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([ir.SymbolicDim(size)]))
            self.graph.inputs.append(value)
            self.names[rows], self.inputs[name] = value, rows
        return self.names[rows]

    def _count(self, rows: RowSet) -> str:
        dim = shapes.known_dims(self._input(rows))[0]
        assert not isinstance(dim, int) and dim.value is not None
        return dim.value

    def _pack_attention(self, node: ir.Node, attention: Attention) -> bool:
        """Whether attention was replaced by attention among packed rows: of queries, of keys, or of both."""
        demand = self.liveness.rows_of(attention.output)
        rows = None if demand is None or demand.layout != (0, 2) else self._effective(demand.rows)
        needed = self.liveness.keys.get(attention)
        keys = None if needed is None else self._effective(needed)
        is_sized = all(self.sizes.knows(d) for d in (*attention.space, shapes.known_dims(attention.output)[1]))
        if (rows is None and keys is None) or not attention.is_plain or not is_sized:
            return False
        batch, queries, columns = attention.space
        op, copy = self.op, self.copy
        q, q_rows = self._all_or(copy[attention.query], (0, 2), rows), self._which(rows, (batch, queries))
        k = self._all_or(copy[attention.key], attention.layout_k, keys)
        v = self._all_or(copy[attention.value], (0, 2), keys)
        given = ((q, attention.query), (k, attention.key), (v, attention.value))
        q, k, v = (self._with_heads(x, origin, attention.output) for x, origin in given)
        made = op.PackedAttention(
            q, k, v, q_rows, self._which(keys, (batch, columns)), self.sizes.vector(op, batch, queries),
            self.sizes.vector(op, batch, columns), self._mask(attention),
            scale=attention.scale, ratio=attention.ratio, causal=int(attention.causal),
        )  # fmt: skip
        made.name = f"{attention.output.name}_rows"
        if rows is not None:
            self.packed[node.outputs[0]] = ((0, 2), rows, made)
            self._note(node, rows)
            return True
        shape = self.sizes.vector(op, batch, queries, *(shapes.known_dims(attention.output)[a] for a in (1, 3)))
        dense = op.Transpose(op.Reshape(made, shape, allowzero=1), perm=[0, 2, 1, 3])
        self.dense[node.outputs[0]] = dense
        return True

    def _with_heads(self, x: Value, origin: Value, output: Value) -> Value:
        """Packed rows (rows, heads, width) with as many heads as the output has: some share their keys and values."""
        heads = shapes.known_dims(output)[1]
        if shapes.known_dims(origin)[1] == heads:
            return x
        return self._once((x, "heads"), lambda: self.op.Expand(x, self.sizes.vector(self.op, 1, heads, 1)))

    def _which(self, rows: RowSet | None, space: tuple[shapes.Dim, ...]) -> Value:
        """The rows of a set, or all of them."""
        return self._all_rows(space) if rows is None else self._input(rows)

    def _all_or(self, x: Value, layout: Layout, rows: RowSet | None) -> Value:
        """The rows of a set, or all, one after the other."""
        if rows is not None:
            return self._rows(x, layout, rows)
        dims = shapes.known_dims(x)
        rest = [dims[a] for a in rest_of(x, layout)]

        def flat() -> Value:
            shape = self.sizes.vector(self.op, *rest)
            target = self.op.Concat(self.op.ints(-1), shape, axis=0)
            return self.op.Reshape(self._leading(self._padded(x), layout), target)

        return self._once((x, "all"), flat)

    def _all_rows(self, space: tuple[shapes.Dim, ...]) -> Value:
        if space not in self.everything:
            op = self.op
            total = op.Squeeze(self.sizes.value(op, shapes.product(space)), op.ints(0))
            self.everything[space] = op.Range(op.constant(0), total, op.constant(1))
        return self.everything[space]

    def _mask(self, attention: Attention) -> Value | None:
        """All that hides keys as one addend."""
        parts = [self._addend(m, self.copy[m.value], attention) for m in attention.masks]
        if not parts:
            return None
        key = tuple(str(m.value.name) + m.kind for m in attention.masks)

        def total() -> Value:
            made = parts[0]
            for part in parts[1:]:
                made = self.op.Add(made, part)
            return made

        return self._once((key, "mask"), total)

    def _addend(self, mask: Mask, value: Value, attention: Attention) -> Value:
        op = self.op
        if mask.kind == "added":
            return value
        if mask.kind == "subtracted":
            return op.Neg(value)
        zero, hidden = op.like(0.0, attention.query), op.like(float("-inf"), attention.query)
        return op.Where(value, *((zero, hidden) if mask.kind == "kept" else (hidden, zero)))
