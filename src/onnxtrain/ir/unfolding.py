"""Short graphs made whole: of a row of layers that are alike a short graph has four, and the others are copies of one.

Each layer, numbered 0 to 3, has a slice in either pass (``layer_slices``). Slice 1 and slice 2 must be the same but for
being one layer apart, which is checked node by node: that is what makes a row. Further layers are what slice 2 is, one
layer further each.

Where a node stands in the whole row is told by its *shift*, by how many layers it is further than in the short graph:
none up to slice 2, 1 and more for the copies of slice 2, and for slice 3 as many as layers are missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.alike import are_alike, are_equal
from onnxtrain.ir.functions import is_further
from onnxtrain.ir.graphs import ForwardGraph, Signature, TrainingGraph, copy_notes, free_name, is_backward
from onnxtrain.ir.layer_slices import AFTER, BEFORE, OUTSIDE, Slices
from onnxtrain.ir.layers import COPIED, KEPT, LAST, MODEL, Layers, NotRepeatedError, whole_names


def whole(graph: ForwardGraph) -> ForwardGraph:
    """The forward pass that a short one stands for; the short one is not changed.

    Raises:
        NotRepeatedError: its layers are not alike.
    """
    model, signature = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version), graph.signature
    for layers in graph.layers:
        _Unfolding(model.graph, layers, signature.outputs, {}).run()
        signature = _whole_signature(signature, layers)
    _order_inputs(model.graph, signature.inputs)
    return ForwardGraph(model, signature, short=graph)


def make_whole(training: TrainingGraph) -> TrainingGraph:
    """The training graph that one stands for which may be a short one; that one is used up.

    Raises:
        NotRepeatedError: its layers are not alike.
    """
    if not training.layers:
        return training
    model, signature, gradients = training.model, training.signature, training.gradients
    for row in training.layers:
        unfolding = _Unfolding(model.graph, row, signature.outputs, gradients)
        unfolding.run()
        signature, gradients = _whole_signature(signature, row), unfolding.gradients
    _order_inputs(model.graph, (*signature.inputs, *training.output_gradients.values()))
    return dataclasses.replace(training, signature=signature, gradients=gradients, layers=())


def _whole_signature(signature: Signature, layers: Layers) -> Signature:
    return dataclasses.replace(
        signature,
        parameters=whole_names(signature.parameters, layers),
        buffers=whole_names(signature.buffers, layers),
        differentiable=whole_names(signature.differentiable, layers),
    )


def _order_inputs(graph: ir.Graph, names: Iterable[str]) -> None:
    named = {str(v.name): v for v in graph.inputs}
    graph.inputs.clear()
    graph.inputs.extend(named[name] for name in names)


class _Unfolding:
    """One row of a short graph, made whole in place.

    Args:
        graph: the graph.
        layers: the row.
        outputs: names of the outputs that a layer may not give.
        gradients: name of a parameter or input to the output that is its gradient.
    """

    def __init__(self, graph: ir.Graph, layers: Layers, outputs: Collection[str], gradients: Mapping[str, str]) -> None:
        self.graph, self.layers, self.outputs, self.gradients = graph, layers, outputs, dict(gradients)
        self.slices = Slices(graph, layers, self.gradients)
        self.inputs = {str(v.name): v for v in graph.inputs}
        self.place = {v: p for n, v in self.inputs.items() if (p := layers.place(n)) is not None}
        self.further: dict[ir.Value, ir.Value] = {}  # a value and what it is one layer further
        self.nearer: dict[ir.Value, ir.Value] = {}
        self.fixed: set[ir.Value] = set()  # what each layer reads alike
        self.sizes: dict[str, str] = {}  # names of sizes, and what they are one layer further
        self.copies: dict[tuple[ir.Value, int], ir.Value] = {}
        self.names = {str(v.name) for n in graph for v in n.outputs} | {*self.inputs}

    def run(self) -> None:
        """Insert the missing layers.

        Raises:
            NotRepeatedError: the layers are not alike.
        """
        nodes = list(self.graph)
        forward = [n for n in nodes if not is_backward(n)]
        backward = nodes[len(forward) :]
        forward.sort(key=lambda n: self.slices.of_node[n] == OUTSIDE)
        if not all(map(is_backward, backward)):
            raise NotRepeatedError("the backward pass does not follow on the forward pass")
        periods = [self._compare(part) for part in (forward, backward)]
        self._check_readers()
        self._add_inputs()
        copied = [n for n in nodes if self.slices.of_node[n] == COPIED]
        self._add_values(copied)
        copies = {n: [self._copy(n, c) for c in range(1, self.layers.missing + 1)] for n in copied}
        for node in nodes:
            self._point_again(node)
        self._give_gradients()
        self.graph.remove(nodes)
        self.graph.extend(self._in_order(forward, copies, periods[0], is_backward=False))
        self.graph.extend(self._in_order(backward, copies, periods[1], is_backward=True))
        self._check_order()

    def _compare(self, nodes: Sequence[ir.Node]) -> int:
        """By how many nodes one layer is behind its like, which must be as many for all its nodes.

        Nodes of the later layer that have no like belong to the one after it: a row of which only some is needed.
        """
        at = {n: i for i, n in enumerate(nodes)}
        model, copied = ([n for n in nodes if self.slices.of_node[n] == s] for s in (MODEL, COPIED))
        periods, waiting = set[int](), iter(copied)
        for a in model:
            for b in waiting:
                if self._is_match(a, b):
                    periods.add(abs(at[b] - at[a]))
                    break
                self.slices.put(b, LAST)
            else:
                raise NotRepeatedError(f"nothing in the next layer is as {a.op_type} ({a.name})")
        for b in waiting:
            self.slices.put(b, LAST)
        if len(periods) > 1:
            raise NotRepeatedError("the nodes of two layers are in another order")
        return periods.pop() if periods else 0

    def _is_match(self, a: ir.Node, b: ir.Node) -> bool:
        """Whether two nodes are alike, one layer apart; takes note of it."""
        if not are_alike(a, b):
            return False
        read = [(x, y) for x, y in zip(a.inputs, b.inputs, strict=True) if x is not None and y is not None]
        made = list(zip(a.outputs, b.outputs, strict=True))
        if not all(self._correspond(x, y) for x, y in read) or not all(self._are_of_one_form(x, y) for x, y in made):
            return False
        if any(self.further.get(x, y) is not y or self.nearer.get(y, x) is not x for x, y in made):
            return False
        read = [(x, y) for x, y in read if x not in self.place and not x.is_initializer()]
        self.fixed |= {x for x, y in read if x is y}
        for x, y in (*(pair for pair in read if pair[0] not in self.fixed), *made):
            self.further[x], self.nearer[y] = y, x
            for one, other in zip(shapes.dims_of(x) or (), shapes.dims_of(y) or (), strict=True):
                if one != other:
                    self.sizes[str(one)] = str(other)
        return True

    def _correspond(self, x: ir.Value, y: ir.Value) -> bool:
        """Whether the second is what the first is one layer further, or both are one for all layers."""
        if x in self.place or y in self.place:
            one, other = self.place.get(x), self.place.get(y)
            return one is not None and other is not None and (one[0] + 1, one[1]) == other
        if x is y:
            between = self._label(x) in (MODEL, COPIED)
            return not between and x not in self.further and x not in self.nearer
        if x.is_initializer() or y.is_initializer():
            return x.is_initializer() and y.is_initializer() and are_equal(x.const_value, y.const_value)
        one, other = self._label(x), self._label(y)
        if one == COPIED and other == AFTER:  # of the gradient of the last layer's result, which needs no layer
            other = LAST
        if not 0 <= one < LAST or other != one + 1 or {x, y} & self.fixed or not self._are_of_one_form(x, y):
            return False
        return self.further.get(x, y) is y and self.nearer.get(y, x) is x

    def _are_of_one_form(self, x: ir.Value, y: ir.Value) -> bool:
        """Whether two values have one type and the same sizes, or such as are named after each."""
        if x.dtype != y.dtype or shapes.data_of(x) != shapes.data_of(y):
            return False
        one, other = shapes.dims_of(x), shapes.dims_of(y)
        if one is None or other is None or len(one) != len(other):
            return one is other
        return all(a == b or self._are_like_sizes(a, b) for a, b in zip(one, other, strict=True))

    def _are_like_sizes(self, a: shapes.Dim, b: shapes.Dim) -> bool:
        """Whether two sizes have no name but that of a value, which is another in each layer."""
        if isinstance(a, int) or isinstance(b, int) or not (a.value or "").isidentifier():
            return False
        return bool(b.value) and self.sizes.get(str(a.value), b.value) == b.value

    def _label(self, value: ir.Value) -> int:
        return self.slices.of_value.get(value, BEFORE)

    def _check_readers(self) -> None:
        """A layer is read by those beside it, and by nothing else."""
        between = [v for n, label in self.slices.of_node.items() if label in (MODEL, COPIED) for v in n.outputs]
        for value in (*between, *self.place):
            readers = {self.slices.of_node.get(use.node, AFTER) for use in value.uses() if not is_further(use.node)}
            if any(abs(self._label(value) - reader) > 1 for reader in readers):
                raise NotRepeatedError(f"{value.name} is read outside of its row")
        results = {*self.gradients.values()}
        for value in between:
            if value.is_graph_output() and (value.name in self.outputs or value.name not in results):
                raise NotRepeatedError(f"{value.name} is an output")

    def _add_inputs(self) -> None:
        """Add the parameters and buffers of the missing layers."""
        for value, (place, rest) in self.place.items():
            for c in range(1, self.layers.missing + 1) if place == COPIED else ():
                name = self.layers.name(COPIED + c, rest)
                self.inputs[name] = _described(value, name)
                self.graph.inputs.append(self.inputs[name])

    def _add_values(self, copied: Sequence[ir.Node]) -> None:
        """Make the values of the missing layers."""
        own = {*self.sizes.values()}
        for value in (v for n in copied for v in n.outputs):
            dims = shapes.dims_of(value) or ()
            named = [isinstance(d, ir.SymbolicDim) and d.value in own for d in dims]
            for c in range(1, self.layers.missing + 1):
                name = value.name and free_name(f"{value.name}_layer{self.layers.first + COPIED + c}", self.names)
                self.names.add(str(name))
                made = self.copies[value, c] = _described(value, name)
                if any(named):  # after a layer's value: in each layer it is another size
                    pairs = zip(dims, named, strict=True)
                    made.shape = ir.Shape([f"{d.value}_layer{c}" if is_own else d for d, is_own in pairs])

    def _copy(self, node: ir.Node, shift: int) -> ir.Node:
        made = ir.Node(
            node.domain,
            node.op_type,
            [None if v is None else self._at(v, shift) for v in node.inputs],
            list(node.attributes.values()),
            outputs=[self.copies[v, shift] for v in node.outputs],
            name=node.name and f"{node.name}_layer{self.layers.first + COPIED + shift}",
            metadata_props=dict(node.metadata_props),
        )
        copy_notes(node, made)
        return made

    def _at(self, value: ir.Value, shift: int) -> ir.Value:
        """What a value of the short graph is in the whole one, so many layers further.

        Raises:
            NotRepeatedError: nothing tells.
        """
        try:
            if value in self.place:
                place, rest = self.place[value]
                return self.inputs[self.layers.name(place + shift, rest)]
            label = self._label(value)
            if value in self.fixed or (label in (BEFORE, AFTER) and value not in self.nearer):
                return value
            if label in (LAST, AFTER):
                return value if shift == self.layers.missing else self._at(self.nearer[value], shift + 1)
            if label == COPIED:
                return value if not shift else self.copies[value, shift]
            return value if not shift else self._at(self.further[value], shift - 1)
        except KeyError:
            raise NotRepeatedError(f"{value.name} has nothing like it in another layer") from None

    def _point_again(self, node: ir.Node) -> None:
        """Let a node of the short graph read what it reads in the whole one."""
        label = self.slices.of_node[node]
        if label == OUTSIDE:
            self._give_further(node)
            return
        shift = self.layers.missing if label >= LAST else 0
        for index, value in enumerate(node.inputs):
            other = BEFORE if value is None else self._label(value)
            if value is None or (min(label, other) <= 0 and max(label, other) >= LAST):  # of the ends of the row
                continue
            if (now := self._at(value, shift)) is not value:
                node.replace_input_with(index, now)

    def _give_further(self, node: ir.Node) -> None:
        """Let a node that stands for a value some layers further give that value."""
        given = node.inputs[0]
        if not is_further(node) or given is None:
            return
        by = node.attributes["by"].value
        if by and self._label(given) not in (MODEL, COPIED, LAST):
            raise NotRepeatedError(f"{given.name} is not of the layer that hands it over")
        node.replace_input_with(0, self._at(given, by))
        node.domain, node.op_type = "", "Identity"
        node.attributes.clear()

    def _give_gradients(self) -> None:
        """Let the gradients of the missing layers be outputs of the graph."""
        named = {str(v.name): v for v in self.graph.outputs}
        made: dict[str, ir.Value] = {}
        for name, output in self.gradients.items():
            for shift in self._shifts(name, named[output]):
                place = self.layers.place(name)
                own = name if place is None else self.layers.name(place[0] + shift, place[1])
                made[own] = self._at(named[output], shift)
        order = whole_names(self.gradients, self.layers)
        if {*order} != {*made}:
            raise NotRepeatedError("not every layer has the gradients that the others have")
        others = [v for v in self.graph.outputs if v.name not in {*self.gradients.values()}]
        self.gradients = {name: str(made[name].name) for name in order}
        self.graph.outputs.clear()
        self.graph.outputs.extend([*others, *(made[name] for name in order)])

    def _shifts(self, name: str, gradient: ir.Value) -> Iterable[int]:
        """How many layers further a gradient is, once for each layer that has it."""
        label, place = self._label(gradient), self.layers.place(name)
        if place is None:
            if label in (MODEL, COPIED):
                raise NotRepeatedError(f"the gradient of {name} comes from within the row")
            return (0 if label <= 0 else self.layers.missing,)
        if label not in range(KEPT):
            raise NotRepeatedError(f"the gradient of {name} comes from outside of the row")
        if label == COPIED:
            return range(self.layers.missing + 1)
        return (self.layers.missing if label == LAST else 0,)

    def _in_order(
        self, nodes: Sequence[ir.Node], copies: Mapping[ir.Node, Sequence[ir.Node]], period: int, is_backward: bool
    ) -> list[ir.Node]:
        """The nodes of a pass as they would be in a graph of the whole row."""
        missing, found = self.layers.missing, list[tuple[int, ir.Node]]()
        end = max((at for at, n in enumerate(nodes) if n in copies), default=0)
        for at, node in enumerate(nodes):
            label = self.slices.of_node[node]
            is_beyond = label in (0, MODEL, COPIED) if is_backward else label in (LAST, OUTSIDE)
            is_later = is_beyond or at > end
            found.append((at + missing * period * is_later, node))
            for c, copy in enumerate(copies.get(node, ()), 1):
                found.append((at + (missing - c if is_backward else c) * period, copy))
        return [node for _, node in sorted(found, key=lambda entry: entry[0])]

    def _check_order(self) -> None:
        """No node reads what is made after it."""
        made: set[ir.Node | None] = {None}
        for node in self.graph:
            if any(v is not None and v.producer() not in made for v in node.inputs):
                raise NotRepeatedError(f"{node.name} would come before what it reads")
            made.add(node)


def _described(value: ir.Value, name: str | None) -> ir.Value:
    """Another value of the same form."""
    made = ir.Value(name=name, type=value.type, shape=value.shape)
    copy_notes(value, made)
    return made
