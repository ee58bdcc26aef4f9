"""FusedAdam: each of its formulas as it is written, in every type, from states that other optimizers have saved."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import OptimizerError
from onnxtrain.optim import AdamWMode, FusedAdam, step_in_backward

STEPS = 5


def parameters_like(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in ((5, 7), (3,), (), (0, 4), (70, 33))
    ]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def by_hand(parameters: list[nn.Parameter], mode: int, corrected: bool, lr: float, decay: float, eps: float) -> None:
    """The formulas of ``AdamWMode``, one parameter at a time."""
    means = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for t in range(1, STEPS + 1):
        set_gradients(parameters, t)
        c1, c2 = (1 - 0.9**t, 1 - 0.99**t) if corrected else (1.0, 1.0)
        for parameter, (m, v) in zip(parameters, means, strict=True):
            p, g = parameter.data, parameter.grad
            assert g is not None
            if mode == AdamWMode.ADAM_L2REG:
                g = g + decay * p
            if mode == AdamWMode.ADAMW_TORCH:
                p -= lr * decay * p
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.99).add_(0.01 * g * g)
            if mode == AdamWMode.ADAMW_TRANSFORMERS:
                p -= lr * math.sqrt(c2) / c1 * m / (v.sqrt() + eps)
                p -= lr * decay * p
            else:
                p -= lr * (m / c1) / ((v / c2).sqrt() + eps)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_each_mode_is_its_formula(mode, corrected):
    """In float64; ``eps`` is large, so that where it is added shows."""
    wanted, got = parameters_like(), parameters_like()
    by_hand(wanted, mode, corrected, lr=0.01, decay=0.1, eps=0.05)
    optimizer = FusedAdam(got, 0.01, corrected, (0.9, 0.99), 0.05, mode, 0.1)
    for t in range(1, STEPS + 1):
        set_gradients(got, t)
        optimizer.step()
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)  # torch's kernels count steps in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mode_of_torch_is_torch_bit_for_bit(dtype):
    wanted, got = parameters_like(dtype), parameters_like(dtype)
    adam = torch.optim.AdamW(wanted, lr=0.01, eps=1e-6, weight_decay=0.1, fused=True)
    optimizer = FusedAdam(got, lr=0.01, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.1)
    for t in range(STEPS):
        for parameters, each in ((wanted, adam), (got, optimizer)):
            set_gradients(parameters, t)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("saved_by", ["itself", "torch", "groups"])
def test_a_saved_state_goes_on(saved_by):
    """Its own through a file; that of ``torch.optim.AdamW``; one with the number of steps in the group."""
    first, second, third = parameters_like(), parameters_like(), parameters_like()
    whole = FusedAdam(first, adam_w_mode=2, weight_decay=0.1)
    before = FusedAdam(second, adam_w_mode=2, weight_decay=0.1) if saved_by != "torch" else None
    before = before or torch.optim.AdamW(second, lr=1e-3, eps=1e-6, weight_decay=0.1, fused=True)
    for t in range(3):
        for parameters, optimizer in ((first, whole), (second, before)):
            set_gradients(parameters, t)
            optimizer.step()
    state = before.state_dict()
    if saved_by == "groups":
        (state["param_groups"][0]["step"],) = {s.pop("step") for s in state["state"].values()}
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    after = FusedAdam(third, adam_w_mode=2, weight_decay=0.1)
    after.load_state_dict(torch.load(file))
    for old, new in zip(second, third, strict=True):
        new.data.copy_(old.data)
    for parameters, optimizer in ((first, whole), (third, after)):
        set_gradients(parameters, 7)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_a_parameter_without_a_gradient_waits():
    """It is not updated, and its first step is its first."""
    alone, beside = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([alone, beside], lr=0.1)
    alone.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(beside, torch.ones(3)) and beside not in optimizer.state
    after_one = alone.detach().clone()
    alone.grad, beside.grad = None, torch.ones(3)
    optimizer.step()
    assert torch.equal(beside, after_one)
    optimizer.zero_grad()
    assert beside.grad is None


def test_gradients_stay_as_zeros_where_asked():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([parameter], set_grad_none=False)
    parameter.grad = torch.ones(3)
    optimizer.zero_grad()
    assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_it_trains_an_ortmodule_as_eager_and_steps_in_the_backward_pass(mode):
    """With groups, a schedule and a closure; with ``step_in_backward`` the same to the bit."""
    losses = []
    for kind in ("eager", "graph", "early"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
        model = module if kind == "eager" else ORTModule(module)
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() > 1) is is_matrix]} for is_matrix in (True, False)
        ]
        groups[1]["lr"] = 0.02
        optimizer = FusedAdam(groups, lr=0.01, weight_decay=0.1, adam_w_mode=mode)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        if kind == "early":
            step_in_backward(optimizer)
        x, seen = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), []
        for _ in range(6):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=1e-5)
    assert losses[1] == losses[2] and losses[0][-1] < losses[0][0]


def test_a_closure_is_called_with_gradients_on():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0 and (parameter < 1).all()


def test_what_it_cannot_do_is_said():
    for wrong in ({"adam_w_mode": 3}, {"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -0.1}):
        with pytest.raises(OptimizerError):
            FusedAdam(parameters_like(), **wrong)
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = FusedAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="SparseAdam"):
        optimizer.step()
