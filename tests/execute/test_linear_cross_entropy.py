"""The cross entropy of a linear layer in chunks of rows: as torch's of all scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_cases.case import Case, exactly, index, x
from op_runs import prepare, run

from onnxtrain.execute.torch.lowerings import linear_cross_entropy as lowerings
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
ALL = (True, True, True, True)


def _operands(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, 11, (rows,))
    labels[3::7] = -100
    return torch.randn(rows, 6).to(dtype), torch.randn(11, 6).to(dtype), torch.randn(11).to(dtype), labels


def _expected(operands: Sequence[Tensor], reduction: str) -> tuple[Tensor, ...]:
    """The loss, and the gradients of a gradient of 1."""
    *leaves, labels = operands
    leaves = [t.detach().requires_grad_() for t in leaves]
    loss = F.cross_entropy(
        F.linear(*leaves).to(torch.promote_types(leaves[0].dtype, torch.float32)), labels, reduction=reduction
    )
    return (loss, *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 63, 64, 150, 256])
def test_chunks_add_up(rows: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowerings, "_FEWEST", 20)
    operands = _operands(rows)
    ours = lowerings.linear_cross_entropy(*operands, needed=ALL, reduction=reduction)
    for a, b in zip(ours, _expected(operands, reduction), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 1, 63, 150])
def test_ignored_rows_that_are_computed_count_nothing(
    rows: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device computes them."""
    monkeypatch.setattr(lowerings, "_FEWEST", 20)
    operands = _operands(rows)
    ours = lowerings._of_all(operands, operands[3] != -100, reduction == "mean", [True] * 3)
    for a, b in zip(ours, _expected(operands, reduction), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("needed", [(True,), (True, False, True, False), (False, True, False)])
def test_only_what_is_read_is_computed(needed: tuple[bool, ...]) -> None:
    operands = _operands(20)
    made = lowerings.linear_cross_entropy(*operands, needed=needed)
    made = made if isinstance(made, tuple) else (made,)
    assert len(made) == len(needed)
    for a, b, asked in list(zip(made, _expected(operands, "mean"), needed, strict=False))[1:]:
        assert (a is not None) is asked
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    """No farther from float64 than eager torch, with room for a rounding."""
    operands = _operands(200, dtype)
    ours = lowerings.linear_cross_entropy(*operands, needed=ALL)
    exact = _expected([t.double() if t.is_floating_point() else t for t in operands], "mean")
    for a, eager, b in zip(ours, _expected(operands, "mean"), exact, strict=True):
        assert a is not None and a.dtype == torch.float32
        room = 4 * torch.finfo(dtype).eps * b.abs().max()
        assert (a - b).abs().max() <= (eager - b).abs().max() + room


@pytest.mark.parametrize("label", [11, -1])
def test_label_out_of_range_is_an_error(label: int) -> None:
    operands = _operands(20)
    operands[3][5] = label
    with pytest.raises(IndexError, match=f"label {label} .* 11 classes"):
        lowerings.linear_cross_entropy(*operands)


def test_mean_over_no_label_has_gradient_zero() -> None:
    case = Case("LinearCrossEntropy", (x(4, 3), x(5, 3), x(5), index(4, high=1)), F.linear, {"ignore_index": 0}, DOMAIN)
    (loss,), gradients = run(prepare(case, np.float64, gradients=True), "torch")
    assert np.isnan(loss) and len(gradients) == 3 and not any(g.any() for g in gradients)


def test_a_gradient_of_one_copies_nothing() -> None:
    g = torch.randn(3, 4)
    half = g / 2
    assert torch.equal(lowerings.scale_gradient(g, torch.tensor(0.5)), half)
    assert lowerings.scale_gradient_(g, torch.tensor(1.0)) is g and not torch.equal(g, half)
    assert lowerings.scale_gradient_(g, torch.tensor(0.5)) is g and torch.equal(g, half)


def test_scores_that_differ_much_have_an_exact_loss() -> None:
    """The probability of the label underflows, its logarithm must not."""
    operand = exactly(np.eye(2) * 1e4)
    case = Case("LinearCrossEntropy", (operand, operand, None, exactly(np.array([1, 1]))), F.linear, domain=DOMAIN)
    (loss,), _ = run(prepare(case, np.float32, gradients=True), "torch")
    np.testing.assert_allclose(loss, 5e7)
