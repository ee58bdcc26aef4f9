"""CUDA's attention kernels as they are called: stood in for by what they are said to compute, and by fake ones.

There is a CUDA device on few machines: ``test_backends.test_on_a_gpu`` runs the kernels themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import CASES, Case
from op_cases.packing import HOLES, ROWS, SOME
from op_runs import prepare, run
from torch._subclasses.fake_tensor import FakeTensorMode

from onnxtrain.execute.torch import attention_kernels, padded_attention
from onnxtrain.execute.torch.lowerings import packed_attention as lowerings

Tensor = torch.Tensor
INFINITY = float("inf")


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    scores = scores if bias is None else scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INFINITY)
    return scores


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, is_causal, scale)
    return scores.softmax(-1), scores.logsumexp(-1)


def _plain(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, sums: Tensor, is_causal: bool, scale: float) -> Any:
    """Gradients by the weights that the sums tell."""
    weights = torch.exp(_scores(q, k, bias, is_causal, scale) - sums[..., None])
    dweights = dy @ v.mT
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale
    return dscores @ k, dscores.mT @ q, weights.mT @ dy


class Kernels:
    """What the kernels are said to compute; each call checks what they are said to want.

    Attributes:
        called: their names.
    """

    def __init__(self) -> None:
        self.called: list[str] = []

    def _scaled_dot_product_flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
    ) -> Any:
        self._see("flash", q, k, v)
        assert not dropout_p and not return_debug_mask and q.shape[-1] % 8 == 0
        weights, sums = _weights(q, k, None, is_causal, scale)
        return weights @ v, sums, None, None, q.shape[2], k.shape[2], None, None, None

    def _scaled_dot_product_flash_attention_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, *rest: Any, scale: float
    ) -> Any:
        self._see("flash backward", dy, q, k, v)
        q_ends, k_ends, most_rows, most_columns, dropout_p, is_causal, *drawn = rest
        assert (q_ends, k_ends, dropout_p, len(drawn)) == (None, None, 0.0, 2) and sums.is_contiguous()
        assert (most_rows, most_columns) == (q.shape[2], k.shape[2])
        return _plain(dy, q, k, v, None, sums, is_causal, scale)

    def _scaled_dot_product_efficient_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        wanted: bool,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float,
    ) -> Any:
        self._see("efficient", q, k, v)
        assert wanted and not dropout_p
        self._bias(bias, q, k)
        weights, sums = _weights(q, k, bias, is_causal, scale)
        return weights @ v, self._aligned(sums), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, y: Tensor, sums: Tensor, *rest: Any, scale: float
    ) -> Any:
        self._see("efficient backward", dy, q, k, v)
        *_, dropout_p, wanted, is_causal = rest
        self._bias(bias, q, k)
        rows = q.shape[2]
        assert not dropout_p and wanted == [True, True, True, False]
        assert torch.equal(sums, self._aligned(sums[..., :rows]))
        return *_plain(dy, q, k, v, bias, sums[..., :rows], is_causal, scale), None

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, most_rows: int, most_columns: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        self._see("packed", q, k, v)
        assert not dropout_p and not return_debug_mask
        y, sums = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), INFINITY, dtype=q.dtype)
        for rows, columns in self._sequences(q_ends, k_ends, most_rows, most_columns):
            a, b, c = (t.transpose(0, 1) for t in (q[rows], k[columns], v[columns]))
            if a.shape[1] and b.shape[1]:
                weights, sums[:, rows] = _weights(a, b, None, is_causal, scale)
                y[rows] = (weights @ c).transpose(0, 1)
        return y, sums, None, None, None

    def _flash_attention_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, q_ends: Tensor, k_ends: Tensor,
        most_rows: int, most_columns: int, dropout_p: float, is_causal: bool, *drawn: Any, scale: float,
    ) -> Any:  # fmt: skip
        self._see("packed backward", dy, q, k, v)
        assert not dropout_p and len(drawn) == 2 and sums.is_contiguous() and sums.shape == (q.shape[1], q.shape[0])
        made = [torch.zeros_like(t) for t in (q, k, v)]
        for rows, columns in self._sequences(q_ends, k_ends, most_rows, most_columns):
            g, a, b, c = (t.transpose(0, 1) for t in (dy[rows], q[rows], k[columns], v[columns]))
            found = _plain(g, a, b, c, None, sums[:, rows], is_causal, scale)
            for whole, at, one in zip(made, (rows, columns, columns), found, strict=True):
                whole[at] = one.transpose(0, 1)
        return made

    def _see(self, name: str, *operands: Tensor) -> None:
        self.called.append(name)
        assert all(t.stride(-1) == 1 for t in operands)

    @staticmethod
    def _bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
        if bias is not None:
            assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype
            assert bias.stride(-1) == 1 and all(step % 16 == 0 for step in bias.stride()[:-1])

    @staticmethod
    def _aligned(sums: Tensor) -> Tensor:
        return torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32), value=INFINITY)

    @staticmethod
    def _sequences(q_ends: Tensor, k_ends: Tensor, most_rows: int, most_columns: int) -> Any:
        for ends, most in ((q_ends, most_rows), (k_ends, most_columns)):
            assert ends.dtype == torch.int32 and ends.is_contiguous() and int(ends.diff().max()) <= most
        at = [[slice(a, b) for a, b in itertools.pairwise(ends)] for ends in (q_ends, k_ends)]
        return zip(*at, strict=True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Operands on the CPU are taken for CUDA's."""
    made = Kernels()
    monkeypatch.setattr(attention_kernels, "aten", made)
    monkeypatch.setattr(attention_kernels, "_is_cuda", lambda q: True)
    monkeypatch.setattr(attention_kernels, "can_use_flash_attention", lambda given, debug: True)
    monkeypatch.setattr(attention_kernels, "can_use_efficient_attention", lambda given, debug: True)
    return made


DENSE = [c for c in CASES if "ScaledDotProduct" in c.op and not c.op.endswith("Grad")]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("case", DENSE, ids=lambda c: c.id)
def test_the_table(case: Case, flash: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "can_use_flash_attention", lambda given, debug: flash)
    row = prepare(case, np.float64, gradients=True)
    found = run(row, "torch")
    monkeypatch.undo()
    for ours, right in zip((*found[0], *found[1]), itertools.chain(*run(row, "torch")), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-9, atol=1e-12)


def _square(mask: Tensor | None) -> Tensor | None:
    """With two axes at least, as eager wants it."""
    return mask if mask is None or mask.dim() > 1 else mask.view(1, -1)


@pytest.mark.parametrize(
    ("shape", "called"), [(None, "flash"), ((5, 21), "efficient"), ((2, 1, 1, 21), "efficient"), ((1,), "efficient")]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_kernel_serves_both_ways(shape: Any, called: str, is_causal: bool, kernels: Kernels) -> None:
    q, k, v = (torch.randn(2, n, 3, 8, dtype=torch.float64).transpose(1, 2) for n in (5, 21, 21))
    mask = None if shape is None else torch.randn(shape, dtype=torch.float64)
    is_causal = is_causal and mask is None
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*leaves, _square(mask), is_causal=is_causal, scale=0.3)
    dy = torch.randn_like(right)
    made = attention_kernels.forward(q, k, v, mask, is_causal, 0.3)
    assert made is not None and made[1].shape == (2, 3, 5)
    found = attention_kernels.backward(dy, q, k, v, mask, *made, is_causal, 0.3)
    assert found is not None and kernels.called == [called, f"{called} backward"]
    for ours, exact in zip((made[0], *found), (right, *torch.autograd.grad(right, leaves, dy)), strict=True):
        torch.testing.assert_close(ours, exact.detach())


PLACES = {"same": (ROWS, ROWS), "cross": (SOME, HOLES), "no keys": (HOLES, ROWS), "no queries": (ROWS, HOLES)}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_packed_rows_are_the_padded_batchs(
    places: tuple[tuple[int, ...], tuple[int, ...]], causal: int, kernels: Kernels
) -> None:
    rows, columns = (torch.tensor(at) for at in places)
    columns = rows if places[0] == places[1] else columns
    packing = lowerings._packing(torch.empty(0), rows, columns, (3, 5), (3, 5), None, causal)
    q, k, v = (torch.randn(2, len(at), 8, dtype=torch.float64).transpose(0, 1) for at in (rows, columns, columns))
    made = attention_kernels.packed_forward(q, k, v, packing, 0.5)
    if causal and rows is not columns:
        assert made is None, "the kernel counts places from the end"
        return
    assert made is not None
    y, sums, _ = padded_attention.forward(q, k, v, packing, 0.5, 0.0)
    torch.testing.assert_close(made, (y, sums))
    dy = torch.randn_like(y)
    found = attention_kernels.packed_backward(dy, q, k, v, packing, *made, 0.5)
    assert found is not None and kernels.called == ["packed", "packed backward"]
    for ours, right in zip(found, padded_attention.backward(dy, q, k, v, packing, 0.5, 0.0, None), strict=True):
        torch.testing.assert_close(ours, right)


def _both_ways(dtype: torch.dtype, mask: Callable[[], Tensor] | None) -> Any:
    q, k, v = (torch.empty(2, 3, n, 16, dtype=dtype, device="cuda:0") for n in (5, 21, 21))
    given = None if mask is None else mask()
    made = attention_kernels.forward(q, k, v, given, False, 0.3)
    assert made is not None
    return q, made, attention_kernels.backward(torch.empty_like(made[0]), q, k, v, given, *made, False, 0.3), (k, v)


@pytest.mark.parametrize("kind", ["flash", "efficient", "masked"])
def test_this_torch_takes_what_kernels_are_given(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "can_use_flash_attention", lambda given, debug: kind == "flash")
    monkeypatch.setattr(attention_kernels, "can_use_efficient_attention", lambda given, debug: True)
    dtype = torch.bfloat16 if kind == "flash" else torch.float32
    with FakeTensorMode():
        mask = (lambda: torch.empty(2, 1, 1, 21, device="cuda:0")) if kind == "masked" else None
        q, (y, sums), found, (k, v) = _both_ways(dtype, mask)
    assert y.shape == q.shape and y.dtype == dtype and sums.shape == (2, 3, 5) and sums.dtype == torch.float32
    assert [t.shape for t in found] == [t.shape for t in (q, k, v)] and {t.device.type for t in found} == {"cuda"}


def test_this_torch_takes_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "can_use_flash_attention", lambda given, debug: True)
    with FakeTensorMode():
        rows = torch.empty(11, dtype=torch.int64, device="cuda:0")
        packing = lowerings._packing(rows, rows, rows, (3, 5), (3, 5), None, 1)
        q, k, v = (torch.empty(11, 2, 16, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
        made = attention_kernels.packed_forward(q, k, v, packing, 0.3)
        assert made is not None and made[0].shape == q.shape and made[1].shape == (11, 2)
        found = attention_kernels.packed_backward(torch.empty_like(q), q, k, v, packing, *made, 0.3)
    assert found is not None and [t.shape for t in found] == [q.shape] * 3


def test_what_is_switched_off_or_does_not_fit_is_left_to_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 3, 8)
    monkeypatch.setattr(attention_kernels, "_is_cuda", lambda q: True)
    assert attention_kernels.forward(q, q, q, None, False, 1.0) is None, "PyTorch says that no kernel takes it"
    assert attention_kernels.forward(q, q[:, :1], q[:, :1], None, False, 1.0) is None
    assert attention_kernels.forward(q[:, :, :0], q, q, None, False, 1.0) is None
