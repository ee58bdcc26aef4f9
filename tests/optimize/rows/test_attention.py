"""Attention and its masks, found in graphs: what is one, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.optimize.rows.attention import Attention, attentions

SHAPES = {
    "q": ("b", 2, "t", 4), "k": ("b", 2, 4, "t"), "keys": ("b", 2, "t", 4), "v": ("b", 2, "t", 4),
    "mask": ("b", 1, 1, "t"), "bias": (1, 2, "t", "t"), "factor": (),
}  # fmt: skip
EARLY = ("mask", "seen")
LOWEST = np.float32(-3.4e38)


class Made:
    """A graph whose inputs are values of one attention; the mask and a condition are known early."""

    def __init__(self) -> None:
        kinds = dict.fromkeys(SHAPES, ir.DataType.FLOAT) | {"seen": ir.DataType.BOOL}
        shapes = SHAPES | {"seen": SHAPES["mask"]}
        self.inputs = {n: ir.val(n, kinds[n], shapes[n]) for n in shapes}
        self.graph = ir.Graph([*self.inputs.values()], [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name="made")
        self.op = Builder(self.graph)

    def __getattr__(self, name: str) -> ir.Value:
        return self.inputs[name]

    def number(self, content: float) -> ir.Value:
        return self.op.constant(np.float32(content))

    def find(self) -> list[Attention]:
        early = {self.inputs[n] for n in EARLY} | {*self.graph.initializers.values()}
        for node in self.graph:
            if all(x is None or x in early for x in node.inputs):
                early.update(node.outputs)
        return attentions(self.graph, early)

    def written_out(self, scores: Callable[[ir.Value], ir.Value], weights: Any = None) -> list[Attention]:
        found = self.op.Softmax(scores(self.op.MatMul(self.q, self.k)), axis=-1)
        self.op.MatMul(found if weights is None else weights(found), self.v)
        return self.find()


def kinds(attention: Attention) -> list[str]:
    return [m.kind for m in attention.masks]


def test_one_node() -> None:
    for op_type, more, causal in (
        ("ScaledDotProductAttention", (), False),
        ("CausalScaledDotProductAttention", (), True),
        ("MaskedScaledDotProductAttention", ("mask",), False),
    ):
        made = Made()
        getattr(made.op, op_type)(made.q, made.keys, made.v, *(made.inputs[n] for n in more), scale=0.5)
        (found,) = made.find()
        assert (found.scale, found.causal, found.is_plain, found.layout_k) == (0.5, causal, True, (0, 2))
        assert kinds(found) == ["added"] * len(more) and found.others == ()
        assert [str(d) for d in found.space] == ["b", "t", "t"]


def test_one_node_with_a_learned_bias() -> None:
    made = Made()
    made.op.MaskedScaledDotProductAttention(made.q, made.keys, made.v, made.op.Add(made.bias, made.mask))
    (found,) = made.find()
    assert [m.value.name for m in found.masks] == ["mask"] and not found.is_plain and len(found.others) == 1


def test_a_bias_that_a_condition_replaces_hides() -> None:
    made = Made()
    hidden = made.op.Where(made.seen, made.bias, made.number(LOWEST))
    (found,) = made.written_out(lambda s: made.op.Add(s, hidden))
    assert [(m.value.name, m.kind, m.fill) for m in found.masks] == [("seen", "kept", float(LOWEST))]
    assert found.others == (hidden,) and not found.is_plain


SCORES: dict[str, tuple[Callable[[Made, ir.Value], ir.Value], list[str], float]] = {
    "bare": (lambda m, s: s, [], 1.0),
    "scaled": (lambda m, s: m.op.Mul(m.number(0.5), s), [], 0.5),
    "divided": (lambda m, s: m.op.Div(s, m.number(4.0)), [], 0.25),
    "added": (lambda m, s: m.op.Add(m.op.Mul(s, m.number(0.5)), m.mask), ["added"], 0.5),
    "subtracted": (lambda m, s: m.op.Sub(s, m.mask), ["subtracted"], 1.0),
    "summed": (lambda m, s: m.op.Add(s, m.op.Add(m.mask, m.mask)), ["added"], 1.0),
    "kept": (lambda m, s: m.op.Where(m.seen, s, m.number(LOWEST)), ["kept"], 1.0),
    "replaced": (lambda m, s: m.op.Where(m.seen, m.number(-1e4), s), ["replaced"], 1.0),
    "then": (lambda m, s: m.op.Where(m.seen, m.op.Add(s, m.mask), m.number(LOWEST)), ["added", "kept"], 1.0),
}


@pytest.mark.parametrize("name", SCORES)
def test_written_out(name: str) -> None:
    scores, masks, scale = SCORES[name]
    made = Made()
    (found,) = made.written_out(lambda s: scores(made, s))
    assert kinds(found) == masks and found.scale == scale and found.is_plain
    assert (found.query, found.key, found.value) == (made.q, made.k, made.v) and found.layout_k == (0, 3)


def test_a_learned_bias_is_no_mask() -> None:
    made = Made()
    (found,) = made.written_out(lambda s: made.op.Add(s, made.op.Add(made.bias, made.mask)))
    assert [m.value.name for m in found.masks] == ["mask"] and found.others == (made.bias,) and not found.is_plain


@pytest.mark.parametrize("known", [True, False])
def test_dropout_of_the_weights(known: bool) -> None:
    made = Made()
    ratio = made.number(0.25) if known else made.factor
    (found,) = made.written_out(lambda s: s, lambda w: made.op.Dropout(w, ratio, made.op.constant(True)))
    assert found.is_plain == known and found.ratio == (0.25 if known else 0.0)


def test_a_mask_of_weights_is_passed() -> None:
    made = Made()
    (found,) = made.written_out(lambda s: s, lambda w: made.op.Where(made.seen, w, made.number(0.0)))
    assert not found.masks and not found.is_plain


NOT: dict[str, Callable[[Made], list[Attention]]] = {
    "scores are read": lambda m: m.written_out(lambda s: (m.op.Relu(s), s)[1]),
    "weights are read": lambda m: m.written_out(lambda s: s, lambda w: (m.op.Relu(w), w)[1]),
    "weights are multiplied": lambda m: m.written_out(lambda s: s, lambda w: m.op.Mul(w, m.mask)),
    "scores are squared": lambda m: m.written_out(lambda s: m.op.Mul(s, s)),
    "scores are scaled by a learned number": lambda m: m.written_out(lambda s: m.op.Mul(s, m.factor)),
    "the mask is scaled": lambda m: m.written_out(lambda s: m.op.Mul(m.op.Add(s, m.mask), m.number(2.0))),
    "hidden scores are not low": lambda m: m.written_out(lambda s: m.op.Where(m.seen, s, m.number(-5.0))),
    "scores go through tanh": lambda m: m.written_out(lambda s: m.op.Tanh(s)),
}


@pytest.mark.parametrize("name", NOT)
def test_what_only_looks_like_attention(name: str) -> None:
    assert NOT[name](Made()) == []


def test_another_axis_is_no_attention() -> None:
    made = Made()
    made.op.MatMul(made.op.Softmax(made.op.MatMul(made.q, made.k), axis=2), made.v)
    assert made.find() == []
