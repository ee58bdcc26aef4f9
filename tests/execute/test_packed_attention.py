"""Attention among packed rows with dropout: what is drawn, and result and gradients for what was kept."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from op_cases.packing import HOLES, ROWS, SOME

from onnxtrain.execute import backend
from onnxtrain.execute.torch import packed_rows, padded_attention
from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.execute.torch.lowerings import packed_attention as lowerings
from onnxtrain.execute.torch.lowerings import random
from onnxtrain.execute.torch.packed_rows import Packing
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Plan, Signature
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan import make_plan

Tensor = torch.Tensor
RATIO, SCALE, SHAPE = 0.25, 0.5, (3, 5)


def _plan(
    rows: tuple[int, ...], columns: tuple[int, ...], mask: np.ndarray | None, causal: int,
    shape: tuple[int, int] = SHAPE, ratio: float = RATIO, width: int = 4,
) -> Plan:  # fmt: skip
    """Result and mask of dropout of double-precision operands."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="g")
    sizes = (("q", len(rows)), ("k", len(columns)), ("v", len(columns)))
    operands = [ir.val(n, dtype=ir.DataType.DOUBLE, shape=[size, 2, width]) for n, size in sizes]
    graph.inputs.extend(operands)
    op = Builder(graph)
    at = (op.ints(*rows), op.ints(*columns), op.ints(*shape), op.ints(*shape))
    added = None if mask is None else op.constant(mask)
    y, _, kept = op.PackedAttention(*operands, *at, added, scale=SCALE, ratio=ratio, causal=causal, outputs=3)
    for name, value in (("y", y), ("kept", kept)):
        value.name = name
        graph.outputs.append(value)
    names = ("q", "k", "v")
    return make_plan(
        build_gradient(ForwardGraph(ir.Model(graph, ir_version=10), Signature(names, (), (), ("y", "kept"), {}, names)))
    )


def _dense(
    q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, ...], columns: tuple[int, ...], mask: np.ndarray | None,
    causal: int, kept: Tensor,
) -> Tensor:  # fmt: skip
    """The same of one sequence after the other, with that mask of dropout."""
    made, count = [], 0
    for entry in range(SHAPE[0]):
        here, there = ([i for i, row in enumerate(at) if row // SHAPE[1] == entry] for at in (rows, columns))
        a, b, c = q[here].transpose(0, 1), k[there].transpose(0, 1), v[there].transpose(0, 1)
        scores = SCALE * a @ b.mT
        i, j = (
            torch.tensor(at, dtype=torch.int64) % SHAPE[1]
            for at in ([rows[n] for n in here], [columns[n] for n in there])
        )
        if mask is not None:
            scores = scores + torch.from_numpy(mask)[entry][:, i][:, :, j]
        if causal:
            scores = scores.masked_fill(j > i[:, None], -torch.inf)
        drawn = kept[count : count + scores.numel()].view(scores.shape)
        count += scores.numel()
        if there:
            blind = scores.amax(-1, True) == -torch.inf
            scores = torch.where(blind, 0.0, scores).softmax(-1) * ~blind
        made.append((scores * drawn / (1 - RATIO) @ c).transpose(0, 1))
    assert count == kept.numel()
    return torch.cat(made)


MASK = np.where(np.arange(50).reshape(1, 2, 5, 5) % 3 == 1, -np.inf, 0.5) * np.ones((3, 1, 1, 1))
PLACES = {
    "same": (ROWS, ROWS, None, 0),
    "cross": (SOME, HOLES, None, 0),
    "no-keys": (HOLES, ROWS, MASK, 0),
    "causal": (HOLES, HOLES, MASK, 1),
    "causal-blind": (SOME, HOLES[1:], None, 1),
}


@pytest.mark.parametrize("name", ["torch", "torch-by-heads", "onnxruntime", "reference"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_result_and_gradients_for_what_was_kept(
    places: tuple[tuple[int, ...], tuple[int, ...], np.ndarray | None, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "torch-by-heads":
        monkeypatch.setattr(packed_rows, "_BLOCK", 1)
    rows, columns, mask, causal = places
    torch.manual_seed(1)
    q, k, v = (torch.randn(len(at), 2, 4, dtype=torch.float64) for at in (rows, columns, columns))
    executable = backend(name.split("-")[0]).compile(_plan(*places))
    (y, kept), saved = executable.forward([q, k, v])
    dy = torch.randn(len(rows), 2, 4, dtype=torch.float64)
    ours = executable.backward(saved, [dy])
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    right = _dense(*leaves, rows, columns, mask, causal, torch.as_tensor(np.asarray(kept)))
    np.testing.assert_allclose(y, right.detach(), rtol=1e-9, atol=1e-12)
    for a, b in zip(ours, torch.autograd.grad(right, leaves, dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_what_is_added_to_doubles_is_of_doubles() -> None:
    """torch's kernel reads float32 there wrongly, on processors without AVX-512."""
    q, rows = torch.randn(4, 2, 4, dtype=torch.float64), torch.tensor([0, 2, 3, 4])
    for mask in (None, torch.zeros(1, 5)):
        packing = lowerings._packing(q, rows[1:], rows, (1, 5), (1, 5), mask, 1)
        (part,) = packing.parts(2, True)
        addend = part.addend()
        assert addend is not None and addend.dtype == torch.float64


SEQUENCES, LONGEST, WIDTH = 60, 40, 64


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("ratio", [0.0, RATIO])
def test_what_is_told_of_memory_is_what_many_sequences_take(
    ratio: float, causal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each call a few sequences are looked at, the largest ones, however many there are."""
    random_lengths = np.random.default_rng(3).integers(1, LONGEST + 1, (2, SEQUENCES))
    rows, columns = (tuple(np.flatnonzero(np.arange(LONGEST) < n[:, None]).tolist()) for n in random_lengths)
    plan = _plan(rows, columns, None, causal, (SEQUENCES, LONGEST), ratio, WIDTH)
    looked_at = []
    parts = Packing.parts
    monkeypatch.setattr(Packing, "parts", lambda *given: (found := parts(*given), looked_at.append(len(found)))[0])
    given = [torch.randn(len(at), 2, WIDTH, dtype=torch.float64) for at in (rows, columns, columns)]
    executable = backend("torch").compile(plan)
    told = executable.footprint(given).peak
    assert len(looked_at) == 2 and max(looked_at) <= 3

    def step() -> None:
        (y, _), saved = executable.forward(given)
        executable.backward(saved, [torch.empty_like(y)])

    step()
    assert told == pytest.approx(peak_of(step), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_padded_batch_agrees_with_single_sequences(
    places: tuple[tuple[int, ...], tuple[int, ...], np.ndarray | None, int], dtype: torch.dtype
) -> None:
    """What a device computes at once, the host computes by sequence; float32 inside keeps half types near."""
    rows, columns, mask, causal = places
    torch.manual_seed(2)
    q, k, v, dy = (torch.randn(len(at), 2, 4).to(dtype) for at in (rows, columns, columns, rows))
    added = None if mask is None else torch.from_numpy(mask).to(dtype)
    packing = Packing(torch.tensor(rows), torch.tensor(columns), SHAPE, SHAPE, added, bool(causal))
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    y, sums, drawn = padded_attention.forward(q, k, v, packing, SCALE, RATIO)
    there = padded_attention._Padded(packing).there
    kept = drawn.view(SHAPE[0], 2, SHAPE[1], SHAPE[1]).masked_select(there)  # type: ignore[union-attr]
    right = _dense(q.double(), k.double(), v.double(), rows, columns, mask, causal, kept)
    torch.testing.assert_close(y.double(), right, **tolerance)
    every = lowerings._by_parts(q, k, v, packing, SCALE, 0.0, (True, False))[1]
    assert sums.dtype == every.dtype  # type: ignore[union-attr]
    torch.testing.assert_close(sums, every.masked_fill(every == -torch.inf, 0.0), **tolerance)  # type: ignore[union-attr]
    ours = padded_attention.backward(dy, q, k, v, packing, SCALE, RATIO, drawn)
    theirs = lowerings._by_parts_backward(dy, q, k, v, packing, SCALE, RATIO, kept)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("ratio", [0.0, 1e-4, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0])
def test_each_element_is_kept_by_chance(ratio: float) -> None:
    """Five standard deviations of the mean, of pairs of neighbours and of the bytes of one draw."""
    count = 400_003
    torch.manual_seed(0)
    drawn = random.drawn_mask(count, ratio)
    assert drawn.shape == (count,) and drawn.dtype == torch.bool
    kept = drawn.double()
    chance = 1 - ratio
    for mean, p, n in (
        (kept.mean(), chance, count),
        ((kept[1:] * kept[:-1]).mean(), chance**2, count / 3),
        (kept[5::8].mean(), chance, count // 8),
        (kept[-1000:].mean(), chance, 1000),
    ):
        assert abs(float(mean) - p) <= 5 * (p * (1 - p) / n) ** 0.5 + 1e-12
    assert torch.equal(drawn, random.drawn_mask(count, ratio)) is (ratio in (0.0, 1.0))
    torch.manual_seed(0)
    assert torch.equal(drawn, random.drawn_mask(count, ratio))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_few_elements(count: int) -> None:
    assert random.drawn_mask(count, 0.3).shape == (count,)


def test_sparse_places_reach_the_end() -> None:
    """Where the first distances do not reach the end, more are drawn."""
    torch.manual_seed(0)
    found = [random._places(50, 0.3) for _ in range(4000)]
    hits = torch.cat(found).bincount(minlength=50) / 4000
    assert len(hits) == 50 and bool(((hits - 0.3).abs() < 5 * (0.21 / 4000) ** 0.5).all())


def test_only_dropout_makes_it_random() -> None:
    graph = _plan(ROWS, ROWS, None, 0).forward.graph
    node = next(n for n in graph if n.op_type == "PackedAttention")
    assert Trait.RANDOM in traits_of(node) and Trait.EXPENSIVE in traits_of(node)
    node.attributes["ratio"] = ir.AttrFloat32("ratio", 0.0)
    assert Trait.RANDOM not in traits_of(node)
