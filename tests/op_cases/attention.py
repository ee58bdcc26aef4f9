"""Attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, index, x

FILLED = np.array([6, 5])


def _attention() -> list[Case]:
    def attend(scale: float, causal: bool = False) -> Callable[..., Tensor]:
        return lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, is_causal=causal, scale=scale)

    q, k = x(2, 3, 5, 4), x(2, 3, 6, 4)
    return [
        Case("ScaledDotProductAttention", (q, k, k), attend(0.5), {"scale": 0.5}, DOMAIN),
        Case("CausalScaledDotProductAttention", (q, q, q), attend(0.7, True), {"scale": 0.7}, DOMAIN),
        Case(
            "MaskedScaledDotProductAttention", (q, k, k, np.where(np.tri(5, 6, 1) > 0, 0.0, -1e9)),
            lambda q, k, v: attend(0.5)(q, k, v, torch.tensor(np.where(np.tri(5, 6, 1) > 0, 0.0, -1e9), dtype=q.dtype)),
            {"scale": 0.5}, DOMAIN,
        ),
    ]  # fmt: skip


def _onnx_attention() -> list[Case]:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None, **settings: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, m, **settings)

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh(q @ k.mT * 0.5 / 2.0) * 2.0).softmax(-1) @ v

    def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, b, c = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, 4), (k, 2), (v, 2)))
        return attend(a, b, c, enable_gqa=True).transpose(1, 2).flatten(2)

    def remembered(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat((pk, k), 2), torch.cat((pv, v), 2)
        seen = torch.ones(5, 8, dtype=torch.bool).tril(3)
        return attend(q, keys, values, seen), keys, values

    q, k, v = x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 3)
    seen = np.tri(5, 6, 1) > 0
    nothing = seen & (np.arange(5) != 2)[:, None]
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    past = x(2, 4, 3, 8)

    def some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = torch.tensor(nothing)
        weights = (q @ k.mT * 8**-0.5).masked_fill(~kept, -1e300 if q.dtype == torch.float64 else -1e30).softmax(-1)
        return (weights * kept) @ v

    def told(q: Tensor, k: Tensor, v: Tensor, m: Tensor, mode: int) -> tuple[Tensor, ...]:
        product = q @ k.mT * 8**-0.5
        scores = torch.tanh(product / 2.0) * 2.0
        weights = (scores + m).softmax(-1)
        return weights @ v, k, v, (product, scores, scores + m, weights)[mode]

    def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns, count = torch.arange(5)[:, None], torch.arange(6), torch.tensor(FILLED)[:, None, None, None]
        return attend(q, k, v, columns <= rows + count - 5)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(6) - torch.arange(5)[:, None]
        return attend(q, k, v, (distance >= -2) & (distance <= 1))

    return [
        Case("Attention", (q, k, v), attend, opset=23),
        Case("Attention", (q, k, v), lambda q, k, v: attend(q, k, v, scale=0.3), {"scale": 0.3}, opset=23, label="scale"),
        Case("Attention", (q, k, v), capped, {"scale": 0.5, "softcap": 2.0}, opset=23, label="softcap"),
        Case("Attention", (q, q, q), lambda q, k, v: attend(q, k, v, is_causal=True), {"is_causal": 1}, opset=23, label="causal"),
        Case("Attention", (q, k, v, seen), lambda q, k, v: attend(q, k, v, torch.tensor(seen)), opset=23, label="bool-mask"),
        Case("Attention", (q, k, v, nothing), some, opset=23, label="empty-row"),
        Case("Attention", (q, k, v, x(5, 6)), attend, opset=23, label="learned-mask"),
        Case("Attention", (q, x(2, 2, 6, 8), x(2, 2, 6, 3)), lambda q, k, v: attend(q, k, v, enable_gqa=True), opset=23, label="groups"),
        Case("Attention", (x(2, 5, 32), x(2, 6, 16), x(2, 6, 16)), flat, heads, opset=23, label="flat"),
        Case(
            "Attention", (q, q, q, None, past, past), remembered, {"is_causal": 1}, opset=23, label="past", outputs=3,
        ),
        *(
            Case(
                "Attention", (q, k, v, x(5, 6)), lambda q, k, v, m, n=mode: told(q, k, v, m, n),
                {"softcap": 2.0, "qk_matmul_output_mode": mode}, opset=23, label=f"told-{mode}", outputs=4,
            )
            for mode in range(4)
        ),
        Case("Attention", (q, k, v, None, None, None, FILLED), cached, {"is_causal": 1}, opset=24, label="cache"),
        Case(
            "Attention", (q, k, v), windowed, {"left_window_size": 2, "right_window_size": 1}, opset=25, label="window",
        ),
    ]  # fmt: skip


def _rotary() -> list[Case]:
    def turn(a: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False, width: int = 0) -> Tensor:
        rest = a[..., width:] if width else a[..., :0]
        a = a[..., :width] if width else a
        first, second = (a[..., 0::2], a[..., 1::2]) if pairs else a.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        both = (cos * first - sin * second, sin * first + cos * second)
        return torch.cat((torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1), rest), -1)

    def placed(a: Tensor, cos: Tensor, sin: Tensor, i: Tensor) -> Tensor:
        heads = a.unflatten(-1, (2, -1)).transpose(1, 2)
        return turn(heads, cos[i], sin[i]).transpose(1, 2).flatten(2)

    a, cache = x(2, 3, 5, 8), x(2, 5, 4)
    return [
        Case("RotaryEmbedding", (a, cache, cache), turn, opset=23, static=(1, 2)),
        Case(
            "RotaryEmbedding", (a, cache, cache), lambda a, c, s: turn(a, c, s, pairs=True), {"interleaved": 1},
            opset=23, static=(1, 2), label="interleaved",
        ),
        Case(
            "RotaryEmbedding", (a, x(2, 5, 2), x(2, 5, 2)), lambda a, c, s: turn(a, c, s, width=4),
            {"rotary_embedding_dim": 4, "num_heads": 3}, opset=23, static=(0, 1, 2), label="part",
        ),
        Case(
            "RotaryEmbedding", (x(2, 5, 16), x(9, 4), x(9, 4), index(2, 5, high=9)), placed, {"num_heads": 2},
            opset=23, static=(1, 2), label="positions",
        ),
    ]  # fmt: skip


def _cache() -> list[Case]:
    def written(cache: Tensor, update: Tensor, starts: Sequence[int], axis: int) -> Tensor:
        made = []
        for old, new, start in zip(cache.movedim(axis, 1), update.movedim(axis, 1), starts, strict=True):
            rows = list(old)
            for offset, row in enumerate(new):
                rows[(start + offset) % len(rows)] = row
            made.append(torch.stack(rows))
        return torch.stack(made).movedim(1, axis)

    given = (x(2, 3, 5, 4), x(2, 3, 2, 4))
    return [
        Case("TensorScatter", given, lambda a, b: written(a, b, (0, 0), 2), opset=24),
        Case("TensorScatter", (*given, np.array([3, 1])), lambda a, b: written(a, b, (3, 1), 2), opset=24, label="places"),
        Case(
            "TensorScatter", (x(2, 5, 4), x(2, 2, 4), np.array([4, 1])), lambda a, b: written(a, b, (4, 1), 1),
            {"mode": "circular", "axis": 1}, opset=24, label="circular",
        ),
    ]  # fmt: skip


def _linear() -> list[Case]:
    def recur(
        q: Tensor, k: Tensor, v: Tensor, state: Any = None, decay: Any = None, beta: Any = None, scale: float = 3**-0.5
    ) -> tuple[Tensor, Tensor]:
        """Step by step, with two heads of keys of width 3 and values of width 5."""
        q, k, v = (t.unflatten(-1, (-1, w)) for t, w in ((q, 3), (k, 3), (v, 5)))
        state = q.new_zeros(2, 2, 3, 5) if state is None else state
        made = []
        for t in range(q.shape[1]):
            if decay is not None:
                state = state * decay[:, t].unflatten(-1, (2, -1)).exp()[..., None]
            new = v[:, t]
            if beta is not None:
                new = beta[:, t, :, None] * (new - torch.einsum("bhij,bhi->bhj", state, k[:, t]))
            state = state + k[:, t, :, :, None] * new[:, :, None]
            read = state.repeat_interleave(q.shape[2] // 2, 1)
            made.append(scale * torch.einsum("bhi,bhij->bhj", q[:, t], read).flatten(1))
        return torch.stack(made, 1), state

    def named(*names: str, **settings: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda q, k, v, *more: recur(q, k, v, **dict(zip(names, more, strict=True)), **settings)

    q, k, v, state = x(2, 4, 6), x(2, 4, 6), x(2, 4, 10), x(2, 2, 3, 5)
    decay, each, beta, shared = x(2, 4, 2, high=0.0), x(2, 4, 6, high=0.0), x(2, 4, 2), x(2, 4, 1)
    rows = [
        ("linear", "linear", (q, k, v), recur, {}),
        ("linear", "past", (q, k, v, state), recur, {}),
        ("linear", "groups", (x(2, 4, 12), k, v), recur, {"q_num_heads": 4}),
        ("gated", "gated", (q, k, v, None, decay), named("decay"), {}),
        ("gated", "gated-keys", (q, k, v, None, each), named("decay"), {}),
        ("delta", "delta", (q, k, v, None, None, beta), named("beta"), {}),
        ("delta", "delta-shared", (q, k, v, None, None, shared), named("beta"), {}),
        ("gated_delta", "gated-delta", (x(2, 4, 12), k, v, state, each, beta), recur, {"q_num_heads": 4}),
        ("gated_delta", "scale", (q, k, v, None, decay, shared), named("decay", "beta", scale=0.3), {"scale": 0.3}),
    ]
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    return [
        Case(
            "LinearAttention", given, reference, heads | {"update_rule": rule} | more, opset=27, label=label, outputs=2,
        )
        for rule, label, given, reference, more in rows
    ]  # fmt: skip


CASES = [*_attention(), *_onnx_attention(), *_rotary(), *_cache(), *_linear()]
