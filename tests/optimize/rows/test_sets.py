"""What says that a row is needed, evaluated as a graph and in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.execute import backend
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Signature
from onnxtrain.ir.verify import verify
from onnxtrain.optimize.rows.attention import Attention, attentions
from onnxtrain.optimize.rows.sets import (
    Evaluator,
    Labelled,
    Listed,
    NonZero,
    Positions,
    Reachable,
    RowSet,
    Seen,
    is_within,
    text_of,
    union,
)
from onnxtrain.plan import make_plan

B, T, K, HEADS = 3, 5, 7, 2
SPACE = (ir.SymbolicDim("b"), ir.SymbolicDim("t"))
LOWEST = float(np.finfo(np.float32).min)
rng = np.random.default_rng(0)


class Inputs:
    """A graph of inputs, to which a test adds nodes."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays
        names = {B: "b", T: "t", K: "k"}
        values = []
        for name, array in arrays.items():
            dims = [ir.SymbolicDim(names[d]) if d in names else d for d in array.shape]
            dtype = ir.DataType.from_numpy(array.dtype)
            values.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims)))
        self.graph = ir.Graph(values, [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name="sets")
        self.op = Builder(self.graph)
        self.values = dict(zip(arrays, values, strict=True))

    def attend(self, scores: Any, keys: int = T) -> Attention:
        """Written-out attention whose scores a function makes from the product of queries and keys."""
        op, v = self.op, self.values
        op.MatMul(op.Softmax(scores(op.MatMul(v["q"], v["k"])), axis=-1), v["v"])
        early = {x for name, x in v.items() if name not in "qkv"}
        early |= {*self.graph.initializers.values()}
        for node in self.graph:
            if all(x is None or x in early for x in node.inputs):
                early.update(node.outputs)
        (found,) = attentions(self.graph, early)
        return found

    def run(self, *values: ir.Value | None) -> list[np.ndarray]:
        """What values are, on two backends."""
        for index, value in enumerate(values):
            assert value is not None
            made = self.op.Identity(value)
            made.name = f"result_{index}"
            self.graph.outputs.append(made)
        names = tuple(str(x.name) for x in self.graph.inputs)
        model = ir.Model(self.graph, ir_version=10)
        verify(model)
        signature = Signature(names, (), (), tuple(str(x.name) for x in self.graph.outputs), {}, ())
        plan, arrays = make_plan(ForwardGraph(model, signature)), list(self.arrays.values())
        found, again = (backend(name).compile(plan).forward(arrays)[0] for name in ("reference", "onnxruntime"))
        for expected, result in zip(found, again, strict=True):
            np.testing.assert_array_equal(np.asarray(expected), np.asarray(result))
        return [np.asarray(x) for x in found]


def holds(given: Inputs, rows: RowSet, found: Sequence[Attention] = ()) -> np.ndarray:
    evaluator = Evaluator(given.graph, list(found))
    given.op.before = None
    return given.run(evaluator.mask(rows))[0]


def tokens(keys: int = T) -> dict[str, np.ndarray]:
    """Queries, keys and values of as many tokens."""
    q, k, v = (
        rng.normal(size=(B, HEADS, T, 4)),
        rng.normal(size=(B, HEADS, 4, keys)),
        rng.normal(size=(B, HEADS, keys, 4)),
    )
    return {name: x.astype(np.float32) for name, x in (("q", q), ("k", k), ("v", v))}


def flags(*shape: int, share: float = 0.5) -> np.ndarray:
    return rng.random(shape) < share


LABELS = np.where(flags(B, T), -100, rng.integers(0, 5, (B, T)))


def test_labels() -> None:
    found = holds(Inputs(labels=LABELS), frozenset({Labelled("labels", -100, "labels")}))
    np.testing.assert_array_equal(found, (LABELS != -100).reshape(-1))


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (2, 3), (-1, 0), (-2, -1), (0, 3), (1, 2**63 - 1), (-2, 2**63 - 1), (0, -1), (1, -2)]
)
def test_positions(start: int, stop: int) -> None:
    expected = np.zeros((B, T), bool)
    expected[:, start : T if (start, stop) == (-1, 0) else stop] = True
    found = holds(Inputs(labels=LABELS), frozenset({Positions(SPACE, start, stop)}))
    np.testing.assert_array_equal(found, expected.reshape(-1))


def test_positions_of_a_set() -> None:
    """The tokens of a slice whose own rows are of a set: labels moved by one."""
    given = Inputs(labels=LABELS, moved=LABELS[:, 1:])
    inner = frozenset({Labelled("moved", -100, "labels")})
    found = holds(given, frozenset({Positions(SPACE, 0, -1, inner)})).reshape(B, T)
    np.testing.assert_array_equal(found[:, :-1], LABELS[:, 1:] != -100)
    assert not found[:, -1].any()


@pytest.mark.parametrize("shape", [(B,), (B, 1)])
def test_listed(shape: tuple[int, ...]) -> None:
    places = np.array([0, -1, 3])
    expected = np.zeros((B, T), bool)
    expected[np.arange(B), places] = True
    found = holds(Inputs(labels=LABELS, places=places.reshape(shape)), frozenset({Listed(SPACE, "places", "ids")}))
    np.testing.assert_array_equal(found, expected.reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_factors(dtype: type, inverted: bool, rank: int) -> None:
    factor = flags(B, T).astype(dtype)
    given = factor if rank == 2 else factor[..., None]
    found = holds(Inputs(labels=LABELS, factor=given), frozenset({NonZero(SPACE, "factor", "mask", inverted)}))
    np.testing.assert_array_equal(found, ((factor != 0) != inverted).reshape(-1))


def addends(hidden: np.ndarray, lowest: float) -> np.ndarray:
    return np.where(hidden, np.float32(lowest), np.float32(0))


@pytest.mark.parametrize("lowest", [-10000.0, LOWEST, -np.inf])
@pytest.mark.parametrize("shape", [(B, 1, 1, T), (B, 1, T, T), (1, 1, T, T), (B, HEADS, T, T), (HEADS, T, T), (T, T)])
def test_keys_that_a_query_sees(lowest: float, shape: tuple[int, ...]) -> None:
    hidden = flags(*shape)
    hidden[..., 0] = False
    given = Inputs(labels=LABELS, mask=addends(hidden, lowest), **tokens())
    found = given.attend(lambda scores: given.op.Add(scores, given.values["mask"]))
    seen = (~np.broadcast_to(hidden, (B, HEADS, T, T))).any(1)
    queries = LABELS != -100
    name = str(found.output.name)
    every, some = Seen(name), Seen(name, frozenset({Labelled("labels", -100, "labels")}))
    evaluator = Evaluator(given.graph, [found])
    results = given.run(*(evaluator.mask(frozenset({r})) for r in (every, some)))
    np.testing.assert_array_equal(results[0], seen.any(1).reshape(-1))
    np.testing.assert_array_equal(results[1], (seen & queries[:, :, None]).any(1).reshape(-1))


@pytest.mark.parametrize("kind", ["added", "subtracted", "kept", "replaced", "two", "then"])
def test_flavours_of_masks(kind: str) -> None:
    hidden = flags(B, 1, 1, T)
    hidden[:, 0, 0, 1] = False
    late = ~np.tri(T, dtype=bool)[None, None]
    op_inputs = {"hidden": hidden, "shown": ~hidden, "late": late, "mask": addends(hidden, -10000.0)}
    op_inputs["unmask"] = -op_inputs["mask"]
    given = Inputs(labels=LABELS, **op_inputs, **tokens())
    op, v = given.op, given.values
    lowest = op.constant(np.float32(LOWEST))
    scores = {
        "added": lambda s: op.Add(v["mask"], s),
        "subtracted": lambda s: op.Sub(s, v["unmask"]),
        "kept": lambda s: op.Where(v["shown"], s, lowest),
        "replaced": lambda s: op.Where(v["hidden"], lowest, op.Mul(s, op.constant(np.float32(0.5)))),
        "two": lambda s: op.Add(op.Add(s, v["mask"]), op.Where(v["late"], lowest, op.constant(np.float32(0)))),
        "then": lambda s: op.Where(v["late"], lowest, op.Add(s, v["mask"])),
    }[kind]
    found = given.attend(scores)
    seen = ~np.broadcast_to(hidden | (late & (kind in ("two", "then"))), (B, 1, T, T))[:, 0]
    seen = seen | ~seen.any(-1, keepdims=True) & ~(late[0] & (kind in ("two", "then")))
    evaluator = Evaluator(given.graph, [found])
    result = given.run(given.op.Expand(evaluator.seen(str(found.output.name)), given.op.ints(B, T, T)))[0]
    np.testing.assert_array_equal(result, seen)


def test_a_query_whose_keys_are_masked_alike_sees_them_all() -> None:
    hidden = flags(B, 1, T, T)
    hidden[1, 0, 2] = True
    given = Inputs(labels=LABELS, mask=addends(hidden, -10000.0), **tokens())
    found = given.attend(lambda s: given.op.Add(s, given.values["mask"]))
    seen = ~hidden[:, 0]
    blind = ~seen.any(-1)
    evaluator = Evaluator(given.graph, [found])
    name = str(found.output.name)
    place = frozenset({Positions(SPACE, 2, 3)})
    results = given.run(evaluator.seen(name), evaluator.blind(name, place))
    np.testing.assert_array_equal(results[0], seen | blind[..., None])
    assert bool(results[1]) == bool(blind[:, 2].any()) and blind[1, 2]


def test_without_masks_every_key_is_seen() -> None:
    given = Inputs(labels=LABELS, **tokens())
    found = given.attend(lambda s: given.op.Mul(s, given.op.constant(np.float32(0.5))))
    evaluator, name = Evaluator(given.graph, [found]), str(found.output.name)
    queries = frozenset({Positions(SPACE, 2, 3)})
    results = given.run(evaluator.mask(frozenset({Seen(name, queries)})), evaluator.blind(name, queries))
    assert results[0].shape == (B * T,) and results[0].all() and not results[1]


def test_one_addend_may_show_what_another_hides() -> None:
    hidden = np.ones((B, 1, 1, T), bool)
    hidden[..., 0] = False
    given = Inputs(mask=addends(hidden, -10000.0), again=addends(hidden, 10000.0), **tokens())
    found = given.attend(lambda s: given.op.Add(given.op.Add(s, given.values["mask"]), given.values["again"]))
    evaluator = Evaluator(given.graph, [found])
    assert given.run(evaluator.seen(str(found.output.name)))[0].all()


def closure(start: np.ndarray, seen: np.ndarray) -> np.ndarray:
    for _ in range(T):
        start = start | (start[:, :, None] & seen).any(1)
    return start


def test_rows_that_are_reachable_through_attentions_with_different_masks() -> None:
    one, two = flags(B, 1, T, T, share=0.8), flags(B, 1, T, T, share=0.8)
    given = Inputs(labels=LABELS, one=addends(one, LOWEST), two=addends(two, LOWEST), **tokens())
    op, v = given.op, given.values
    for mask in ("one", "two"):
        op.MatMul(op.Softmax(op.Add(op.MatMul(v["q"], v["k"]), v[mask]), axis=-1), v["v"])
    found = attentions(given.graph, {x for n, x in v.items() if n not in "qkv"})
    seen = np.zeros((B, T, T), bool)
    for hidden in (one[:, 0], two[:, 0]):
        seen |= ~hidden | hidden.all(-1, keepdims=True)
    start: RowSet = frozenset({Labelled("labels", -100, "labels")})
    result = holds(given, frozenset({Reachable(SPACE, start)}), found)
    np.testing.assert_array_equal(result, closure(LABELS != -100, seen).reshape(-1))


def test_a_union_is_what_either_says() -> None:
    factor = flags(B, T)
    given = Inputs(labels=LABELS, factor=factor)
    rows: RowSet = frozenset(
        {Labelled("labels", -100, "labels"), NonZero(SPACE, "factor", "mask"), Positions(SPACE, 0, 1)}
    )
    expected = (LABELS != -100) | factor
    expected[:, 0] = True
    np.testing.assert_array_equal(holds(given, rows), expected.reshape(-1))


def test_unions_and_inclusion() -> None:
    labelled, first, factor = (
        Labelled("labels", -100, "labels"),
        Positions(SPACE, 0, 1),
        NonZero(SPACE, "factor", "mask"),
    )
    a, b, c = (frozenset({r}) for r in (labelled, first, factor))
    assert union(a, a) == a and union(a, b) == union(b, a) == frozenset({labelled, first})
    reach = frozenset({Reachable(SPACE, a)})
    both = frozenset({Reachable(SPACE, a | b)})
    assert union(reach, a) == reach and union(reach, frozenset({Reachable(SPACE, b)})) == both
    assert union(reach, c) == reach | c
    assert is_within(a, a) and is_within(a, reach) and is_within(reach, both) and is_within(a, a | b)
    assert not is_within(reach, a) and not is_within(both, reach) and not is_within(c, reach)
    other = frozenset({Reachable((SPACE[0], ir.SymbolicDim("k")), a)})
    assert not is_within(other, reach)


def test_sets_in_words() -> None:
    labelled: RowSet = frozenset({Labelled("labels", -100, "labels")})
    assert text_of(labelled) == "labels != -100"
    assert text_of(frozenset({Positions(SPACE, -1, 0)})) == "token -1"
    assert text_of(frozenset({Positions(SPACE, 0, 2**63 - 1)})) == "token :"
    assert (
        text_of(frozenset({NonZero(SPACE, "factor", "mask", True), *labelled}))
        == "labels != -100 or not chosen by mask"
    )
    assert text_of(frozenset({Seen("y")})) == "some token attends to it"
    assert text_of(frozenset({Reachable(SPACE, labelled)})) == "labels != -100, or such a row attends to it"
