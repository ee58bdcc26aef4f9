"""Rows without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, exactly, flag, index, ints, x


def _placed(a: Tensor, rows: Tensor, *sizes: int) -> Tensor:
    """Rows of a in zeros."""
    zeros = torch.zeros(int(np.prod(sizes)), *a.shape[1:], dtype=a.dtype)
    return zeros.index_copy(0, rows, a).reshape(*sizes, *a.shape[1:])


def _gathering() -> list[Case]:
    def take(*rows: int) -> Callable[..., Tensor]:
        return lambda a: a[torch.tensor(rows, dtype=torch.int64)]

    rows = exactly(ints(0, 2, 3))
    return [
        Case("ShrunkenGather", (x(5, 3), rows), lambda a, i: a[i], domain=DOMAIN),
        Case("ShrunkenGather", (x(4), ints(1, 3)), take(1, 3), domain=DOMAIN, label="numbers"),
        Case("ShrunkenGather", (x(5, 3, 2), ints()), take(), domain=DOMAIN, label="none"),
        Case("ShrunkenGather", (x(3, 2), ints(0, 1, 2)), take(0, 1, 2), domain=DOMAIN, label="all"),
        Case(
            "ShrunkenGather", (index(5, 3, high=9), rows), lambda a, i: a[i], domain=DOMAIN, label="int64",
            differentiable=False,
        ),
    ]  # fmt: skip


def _dropout() -> list[Case]:
    """Without chance; what it draws is tested by itself."""
    return [
        Case("PackedDropout", (x(3, 4), np.array(0.0)), lambda a: (a, torch.ones(3, 4) > 0), domain=DOMAIN, outputs=2)
    ]


def _padding() -> list[Case]:
    def take(*rows: int) -> Callable[..., Tensor]:
        return lambda a: a.flatten(0, 1)[torch.tensor(rows, dtype=torch.int64)]

    def put(*rows: int, sizes: tuple[int, int]) -> Callable[..., Tensor]:
        return lambda a: _placed(a, torch.tensor(rows, dtype=torch.int64), *sizes)

    rows = exactly(ints(0, 4, 5))
    return [
        Case(
            "FlattenAndUnpad", (x(2, 3, 4, 5), ints(0, 4, 5)), lambda a: (take(0, 4, 5)(a), torch.tensor([2, 3])),
            domain=DOMAIN, outputs=2,
        ),
        Case("FlattenAndUnpad", (x(2, 3, 4), rows), lambda a, i: a.flatten(0, 1)[i], domain=DOMAIN, label="input"),
        Case("FlattenAndUnpad", (x(2, 3), ints(1, 3)), take(1, 3), domain=DOMAIN, label="numbers"),
        Case("FlattenAndUnpad", (x(2, 3, 4), ints()), take(), domain=DOMAIN, label="none"),
        Case("FlattenAndUnpad", (x(2, 3, 4), ints(*range(6))), take(*range(6)), domain=DOMAIN, label="all"),
        *(
            Case(
                "FlattenAndUnpad", (given, rows), lambda a, i: a.flatten(0, 1)[i], domain=DOMAIN, label=label,
                differentiable=False,
            )
            for label, given in (("int64", index(2, 3, high=9)), ("bool", flag(2, 3, 4)))
        ),
        Case("PadAndUnflatten", (x(3, 4, 5), ints(4, 0, 5), ints(2, 3)), put(4, 0, 5, sizes=(2, 3)), domain=DOMAIN),
        Case(
            "PadAndUnflatten", (x(3, 4), rows, exactly(ints(2, 3))), lambda a, i, _: _placed(a, i, 2, 3), domain=DOMAIN,
            label="input",
        ),
        Case("PadAndUnflatten", (x(2), ints(1, 3), ints(2, 2)), put(1, 3, sizes=(2, 2)), domain=DOMAIN, label="numbers"),
        Case("PadAndUnflatten", (x(0, 4), ints(), ints(2, 3)), put(sizes=(2, 3)), domain=DOMAIN, label="none"),
        Case(
            "PadAndUnflatten", (x(6, 4), ints(*range(6)), ints(2, 3)), put(*range(6), sizes=(2, 3)), domain=DOMAIN,
            label="all",
        ),
        *(
            Case(
                "PadAndUnflatten", (given, rows, ints(2, 3)), lambda a, i: _placed(a, i, 2, 3), domain=DOMAIN,
                label=label, differentiable=False,
            )
            for label, given in (("int64", index(3, 4, high=9)), ("bool", flag(3, 4)))
        ),
    ]  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rows: Any,
    columns: Any,
    lengths: Any,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention among the rows of one sequence at a time."""
    made = []
    for entry in range(lengths[0]):
        here, there = ([i % s for i in at if i // s == entry] for at, s in ((rows, lengths[1]), (columns, lengths[2])))
        a = q[[i // lengths[1] == entry for i in rows]].transpose(0, 1)
        b, c = (t[[i // lengths[2] == entry for i in columns]].transpose(0, 1) for t in (k, v))
        scores = scale * a @ b.mT
        if mask is not None:
            full = mask.expand(lengths[0], q.shape[1], *lengths[1:])
            scores = scores + full[entry][:, here][:, :, there]
        if causal:
            late = [[j > i for j in there] for i in here]
            scores = scores.masked_fill(torch.tensor(late, dtype=torch.bool).reshape(scores.shape[1:]), -torch.inf)
        if there:
            blind = scores.amax(-1, True) == -torch.inf
            scores = torch.where(blind, 0.0, scores).softmax(-1) * ~blind
        made.append((scores @ c).transpose(0, 1))
    return torch.cat(made)


ROWS, HOLES, SOME = (0, 1, 2, 5, 6), (0, 2, 3, 10, 13, 14), (2, 10, 14)  # of three sequences of five


def _attention() -> list[Case]:
    def case(
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        lengths: tuple[int, int] = (5, 5),
        mask: Any = None,
        width: int = 4,
        label: str = "",
        **attributes: Any,
    ) -> Case:
        count, (first, second) = max(max(rows) // lengths[0], max(columns) // lengths[1], 2) + 1, lengths
        at = (exactly(ints(*rows)), exactly(ints(*columns)), ints(count, first), ints(count, second))
        given = (x(len(rows), 2, 4), x(len(columns), 2, 4), x(len(columns), 2, width), *at)

        def reference(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
            added = None if mask is None else torch.from_numpy(mask).to(q.dtype)
            causal = bool(attributes.get("causal", 0))
            return attend(q, k, v, added, i.tolist(), j.tolist(), (count, *lengths), 0.5, causal)

        return Case(
            "PackedAttention",
            given if mask is None else (*given, mask),
            reference,
            {"scale": 0.5, **attributes},
            DOMAIN,
            label=label,
        )

    rng = np.random.default_rng(3)
    part = np.where(rng.random((3, 1, 5, 5)) < 0.5, -np.inf, rng.uniform(-1, 1, (3, 1, 5, 5)))
    nothing = np.where(np.arange(5)[:, None] == 2, -np.inf, np.zeros((5, 5)))
    dense = tuple(range(15))
    return [
        case(ROWS, ROWS),
        case(dense, dense, label="dense"),
        case(HOLES, HOLES, label="holes"),
        case(SOME, HOLES, label="some-queries"),
        case(HOLES, ROWS, label="no-keys"),
        case((0, 1, 4, 5), (0, 2, 9, 10, 11), (3, 4), label="cross"),
        case(ROWS, ROWS, mask=rng.uniform(-1, 1, (3, 2, 5, 5)), label="mask"),
        case(HOLES, HOLES, mask=rng.uniform(-1, 1, (3, 1, 1, 5)), label="mask-of-keys"),
        case(SOME, HOLES, mask=rng.uniform(-1, 1, (2, 1, 5)), label="mask-of-heads"),
        case(HOLES, HOLES, mask=rng.uniform(-1, 1, (5, 1)), label="mask-of-queries"),
        case(HOLES, HOLES, mask=part, label="mask-infinite"),
        case(HOLES, HOLES, mask=nothing, label="mask-of-all"),
        case(HOLES, HOLES, causal=1, label="causal"),
        case(SOME, HOLES, causal=1, label="causal-some"),
        case(HOLES, (1, 2, 3, 11, 12), causal=1, label="causal-blind"),
        case(HOLES, HOLES, mask=part, causal=1, label="causal-mask"),
        case(HOLES, SOME, width=3, label="wide"),
        case(HOLES, HOLES, mask=part, width=3, causal=1, label="wide-causal-mask"),
    ]  # fmt: skip


def _reachable(start: Tensor, seen: Tensor) -> Tensor:
    """By as many steps as there are rows."""
    edges = seen.expand(*start.shape, start.shape[1]).to(torch.float64)
    for _ in range(start.shape[1]):
        start = start | ((start.to(torch.float64)[:, None] @ edges)[:, 0] > 0)
    return start


def _reachability() -> list[Case]:
    none, first = np.zeros((2, 5), bool), np.arange(5)[None].repeat(2, 0) == 0
    chain = np.eye(5, k=1, dtype=bool)[None].repeat(2, 0)  # each row sees the next one
    few = np.random.default_rng(4).random((2, 5, 5)) < 0.2

    def case(label: str, start: np.ndarray, seen: np.ndarray) -> Case:
        given = (exactly(start), exactly(seen))
        return Case("ReachableRows", given, _reachable, domain=DOMAIN, label=label, differentiable=False)

    return [
        case("few", first, few),
        case("chain", first, chain),
        case("back", first[:, ::-1].copy(), chain),
        case("nothing-seen", first, np.zeros((2, 5, 5), bool)),
        case("all-seen", first, np.ones((2, 5, 5), bool)),
        case("no-start", none, chain),
        case("one-sequence", np.array([[True, False]]), np.ones((1, 2, 2), bool)),
    ]


def _attention_gradient() -> list[Case]:
    """Without a rule of its own: written out where it is differentiated again."""

    def gradient(g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        leaves = [t if t.requires_grad else t.requires_grad_() for t in (q, k, v)]
        y = attend(*leaves, mask, HOLES, ROWS, (3, 5, 5), 0.5, True)
        return torch.autograd.grad(y, leaves, g, create_graph=True)

    q, k = x(len(HOLES), 2, 4), x(len(ROWS), 2, 4)
    given = (q, q, k, k, ints(*HOLES), ints(*ROWS), ints(3, 5), ints(3, 5))
    mask = np.arange(25).reshape(5, 5) / 25
    settings: dict[str, Any] = {"attributes": {"scale": 0.5, "causal": 1}, "domain": DOMAIN, "outputs": 3}
    return [
        Case("PackedAttentionGrad", given, gradient, **settings),
        Case(
            "PackedAttentionGrad",
            (*given, mask),
            lambda g, q, k, v: gradient(g, q, k, v, torch.from_numpy(mask).to(q.dtype)),
            **settings,
            label="mask",
        ),
    ]


CASES = [*_gathering(), *_dropout(), *_padding(), *_attention(), *_attention_gradient(), *_reachability()]
