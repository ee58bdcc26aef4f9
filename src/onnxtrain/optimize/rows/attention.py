"""Attention in a graph, as one node or written out: its queries, keys, values and masks.

What hides a key is found in the graph and evaluated when it runs, so no flavour of mask has a name here: every term
that is added to the scores and depends on the user's inputs alone, and every such condition that replaces scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.rows.passages import Layout

HIDDEN = -9000.0  # this far below the largest addend of a query a weight is exactly zero (exp underflows)
QUERY: Layout = (0, 2)
_KINDS = ("ScaledDotProductAttention", "CausalScaledDotProductAttention", "MaskedScaledDotProductAttention")


@dataclasses.dataclass(frozen=True)
class Mask:
    """What hides keys from queries; broadcasts to (batch, heads, queries, keys).

    Args:
        value: added to the scores, or a condition under which scores stay.
        kind: ``"added"``, ``"subtracted"``, ``"kept"`` (scores stay where it is true) or ``"replaced"`` (the reverse).
        fill: what a condition puts in place of a score.
    """

    value: ir.Value
    kind: str
    fill: float = float("-inf")

    @property
    def is_condition(self) -> bool:
        """Whether it is true or false, rather than a number."""
        return self.kind in ("kept", "replaced")


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a graph.

    Args:
        nodes: all its nodes; the last one gives the output.
        query: the queries, rows at ``layout_q``.
        key: the keys, rows at ``layout_k``: (batch, heads, tokens, width), or with the last two exchanged.
        value: the values, rows at (0, 2).
        layout_k: where the rows of ``key`` are.
        masks: what hides keys, in the order in which it is applied to the scores.
        others: what else is added to the scores: learned biases, terms computed from activations.
        scale: what the scores are multiplied by.
        ratio: dropout of the weights.
        causal: whether a query sees no later key.
        is_plain: whether it is nothing but this, so that it can be computed among packed rows.
    """

    nodes: tuple[ir.Node, ...]
    query: ir.Value
    key: ir.Value
    value: ir.Value
    layout_k: Layout
    masks: tuple[Mask, ...]
    others: tuple[ir.Value, ...]
    scale: float
    ratio: float
    causal: bool
    is_plain: bool

    @property
    def output(self) -> ir.Value:
        """(batch, heads, queries, width)."""
        return self.nodes[-1].outputs[0]

    @property
    def space(self) -> tuple[shapes.Dim, shapes.Dim, shapes.Dim]:
        """Batch, number of queries, number of keys."""
        batch, _, queries, _ = shapes.known_dims(self.output)
        return batch, queries, shapes.known_dims(self.key)[self.layout_k[1]]


def early_values(graph: ForwardGraph, differentiable: frozenset[str]) -> set[ir.Value]:
    """The values that depend on nothing but the user's inputs, buffers and constants: known before any weight is read.

    Args:
        graph: the forward pass.
        differentiable: names of the inputs that receive a gradient.
    """
    signature = graph.signature
    given = {*signature.user_inputs, *signature.buffers} - differentiable
    inner = graph.model.graph
    found = {v for v in inner.inputs if v.name in given}
    found |= {v for v in inner.initializers.values() if not v.is_graph_input()}
    for node in inner:
        known = all(v is None or v in found for v in node.inputs) or _measures_input(node)
        if known and not traits_of(node) & (Trait.RANDOM | Trait.EFFECT):
            found.update(node.outputs)
    return found


def _measures_input(node: ir.Node) -> bool:
    """Whether a node reads the size of an input, which is known where its content is trained."""
    x = node.inputs[0] if node.inputs else None
    return node.domain == "" and node.op_type in ("Shape", "Size") and x is not None and x.is_graph_input()


def attentions(graph: ir.Graph, early: set[ir.Value]) -> list[Attention]:
    """All attentions of a graph over (batch, heads, tokens, width), in order.

    Left out are those in which a batch shares queries, keys or values: such rows belong to no sequence of it.
    """
    made = (_fused(n, early) if n.domain == DOMAIN else _written_out(n, early) for n in graph)
    return [a for a in made if a is not None and _is_of_one_batch(a)]


def _is_of_one_batch(attention: Attention) -> bool:
    """Whether queries, keys and values are known to be of as many sequences as the result."""
    given = (attention.query, attention.key, attention.value, attention.output)
    shaped = [dims for x in given if (dims := shapes.dims_of(x)) is not None and len(dims) == 4]
    return len(shaped) == len(given) and len({dims[0] for dims in shaped}) == 1


def _fused(node: ir.Node, early: set[ir.Value]) -> Attention | None:
    if node.op_type not in _KINDS or _is_read(node.outputs[1:]):
        return None
    q, k, v = node.inputs[:3]
    assert q is not None and k is not None and v is not None
    mask = shapes.operand(node, 3)
    terms = () if mask is None else _terms(mask, early)
    masks = tuple(m for m in (_mask_in(t, early, "added") for t in terms) if m is not None)
    causal, scale = node.op_type.startswith("Causal"), shapes.attribute(node, "scale", 1.0)
    others = () if mask is None or mask in early else (mask,)
    return Attention((node,), q, k, v, QUERY, masks, others, scale, 0.0, causal, not others)


def _is_read(values: Any) -> bool:
    return any(v.uses() or v.is_graph_output() for v in values)


def _written_out(node: ir.Node, early: set[ir.Value]) -> Attention | None:
    """``Softmax(Q K^T + mask) V``, found at its Softmax."""
    x = node.inputs[0] if node.inputs else None
    if node.op_type != "Softmax" or x is None or x in early or shapes.dims_of(x) is None or shapes.rank(x) != 4:
        return None
    if shapes.attribute(node, "axis", -1) not in (-1, 3):
        return None
    above, below = _Scores(early), _Weights(early)
    if not above.walk(x) or not below.walk(node):
        return None
    if set(above.others) & {v for n in below.nodes for v in n.outputs}:
        return None
    q, k = above.product.inputs
    assert q is not None and k is not None
    return Attention(
        (*above.nodes, node, *below.nodes), q, k, below.values, (0, 3), tuple(above.masks[::-1]), tuple(above.others),
        above.scale, below.ratio, False, above.is_plain and below.is_plain and not above.others,
    )  # fmt: skip


class _Scores:
    """The walk from a Softmax up to the product of queries and keys."""

    def __init__(self, early: set[ir.Value]) -> None:
        self.early = early
        self.nodes: list[ir.Node] = []
        self.masks: list[Mask] = []
        self.others: list[ir.Value] = []
        self.scale, self.is_plain = 1.0, True
        self.product: Any = None

    def walk(self, x: ir.Value) -> bool:
        """Whether a product of four axes was found, each step having a single reader."""
        while True:
            node = x.producer()
            if node is None or node.domain or len(x.uses()) != 1 or x.is_graph_output():
                return False
            self.nodes.insert(0, node)
            if node.op_type == "MatMul":
                self.product = node
                return shapes.rank(node.inputs[0]) == shapes.rank(node.inputs[1]) == 4  # type: ignore[arg-type]
            further = self._above(node)
            if further is None:
                return False
            x = further

    def _above(self, node: ir.Node) -> ir.Value | None:
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type == "Cast":
            return inputs[0]
        if node.op_type in ("Add", "Sub") and self.scale == 1.0:
            return self._added(node, inputs)
        if node.op_type == "Where" and inputs[0] in self.early and self.scale == 1.0:
            return self._replaced(inputs)
        if node.op_type in ("Mul", "Div"):
            return self._scaled(node, inputs)
        return None

    def _added(self, node: ir.Node, inputs: list[ir.Value]) -> ir.Value | None:
        scores = [v for v in inputs if _leads_to_product(v, self.early)]
        if len(scores) != 1 or (node.op_type == "Sub" and scores[0] is not inputs[0]):
            return None
        rest = inputs[1 - inputs.index(scores[0])]
        for value in _terms(rest, self.early):
            mask = _mask_in(value, self.early, "added" if node.op_type == "Add" else "subtracted")
            if mask is not None:
                self.masks.append(mask)
            if value not in self.early:
                self.others.append(value)
        return scores[0]

    def _replaced(self, inputs: list[ir.Value]) -> ir.Value | None:
        found = _condition(inputs)
        if found is None:
            return None
        self.masks.append(found[0])
        return found[1]

    def _scaled(self, node: ir.Node, inputs: list[ir.Value]) -> ir.Value | None:
        places = (0, 1) if node.op_type == "Mul" else (0,)
        for index in places:
            number = shapes.constant_of(inputs[1 - index])
            if number is not None and number.size == 1:
                factor = float(number.reshape(-1)[0])
                self.scale *= factor if node.op_type == "Mul" else 1.0 / factor
                return inputs[index]
        return None


def _condition(inputs: Sequence[Any]) -> tuple[Mask, ir.Value] | None:
    """The mask that a Where is, from its inputs, and what stays where it hides nothing."""
    for index, kind in ((1, "kept"), (2, "replaced")):
        number = shapes.constant_of(inputs[3 - index])
        if number is not None and number.size == 1 and (fill := float(number.reshape(-1)[0])) < HIDDEN:
            return Mask(inputs[0], kind, fill), inputs[index]
    return None


def _mask_in(term: ir.Value, early: set[ir.Value], kind: str) -> Mask | None:
    """What hides keys in a term that is added to scores: all of it, or the condition under which it is a bias."""
    if term in early:
        return Mask(term, kind)
    node = term.producer()
    if kind != "added" or node is None or node.op_type != "Where" or node.domain or node.inputs[0] not in early:
        return None
    found = _condition(node.inputs)
    return None if found is None else found[0]


def _leads_to_product(value: ir.Value, early: set[ir.Value]) -> bool:
    """Whether a value is a product of queries and keys, under masks and scales."""
    for _ in range(8):
        node = value.producer()
        if node is None or value in early or len(value.uses()) != 1:
            return False
        if node.op_type == "MatMul":
            return shapes.rank(value) == 4
        if node.op_type not in ("Add", "Sub", "Where", "Mul", "Div", "Cast"):
            return False
        inputs = [v for v in node.inputs if v is not None and v not in early]
        onward = [v for v in inputs if shapes.rank(v) == 4 and v.producer() is not None]
        if not onward:
            return False
        value = onward[0]
    return False


def _terms(value: ir.Value, early: set[ir.Value]) -> Iterator[ir.Value]:
    """The terms of a sum."""
    node = value.producer()
    if value not in early and node is not None and node.op_type == "Add" and node.domain == "":
        for operand in node.inputs:
            assert operand is not None
            yield from _terms(operand, early)
    else:
        yield value


class _Weights:
    """The walk from a Softmax down to the product with the values."""

    def __init__(self, early: set[ir.Value]) -> None:
        self.early = early
        self.nodes: list[ir.Node] = []
        self.ratio, self.is_plain = 0.0, True
        self.values: Any = None

    def walk(self, node: ir.Node) -> bool:
        """Whether a product was found, each step having a single reader."""
        while True:
            y = node.outputs[0]
            uses = list(y.uses())
            if len(uses) != 1 or y.is_graph_output() or _is_read(node.outputs[1:]):
                return False
            use = uses[0]
            node = use.node
            self.nodes.append(node)
            if node.domain == "" and node.op_type == "MatMul" and use.idx == 0:
                self.values = node.inputs[1]
                return shapes.rank(self.values) == 4
            if not self._passes(node, use.idx):
                return False

    def _passes(self, node: ir.Node, index: int) -> bool:
        if node.domain:
            return False
        if node.op_type == "Cast":
            return True
        if node.op_type == "Dropout" and index == 0:
            ratio = shapes.constant_of(shapes.operand(node, 1))
            self.ratio, known = (0.0, False) if ratio is None else (float(ratio), True)
            self.is_plain &= known
            return True
        if node.op_type == "Where" and index > 0 and node.inputs[0] in self.early:
            self.is_plain = False
            return True
        return False
