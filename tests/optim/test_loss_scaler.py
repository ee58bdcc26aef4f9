"""Loss scales: those of ``torch.amp.GradScaler`` where both do the same, and a loop that uses one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.amp import DynamicLossScaler, LossScaler
from onnxtrain.amp.loss_scaler import StepInfo
from onnxtrain.errors import OptimizerError


def test_the_scale_is_that_of_torch():
    """Over a hundred steps, some of which overflow."""
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ours = DynamicLossScaler(loss_scale=2.0**10, up_scale_window=3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    for overflows in (torch.rand(100, generator=torch.Generator().manual_seed(0)) < 0.15).tolist():
        torch_scaler.scale(torch.ones(()))
        parameter.grad = torch.full((2,), torch.inf if overflows else 1.0)
        torch_scaler.step(optimizer)
        torch_scaler.update()
        assert ours.update(not overflows) == torch_scaler.get_scale()


def test_the_scale_stays_within_its_bounds_and_begins_anew():
    scaler = DynamicLossScaler(loss_scale=4.0, up_scale_window=1, min_loss_scale=2.0, max_loss_scale=8.0)
    assert [scaler.update(True) for _ in range(3)] == [8.0, 8.0, 8.0]
    assert [scaler.update(False) for _ in range(4)] == [4.0, 2.0, 2.0, 2.0]
    scaler.reset()
    assert scaler.loss_scale == 4.0
    assert DynamicLossScaler(automatic_update=False).update(False) == 2.0**16
    assert LossScaler(8.0).update(False) == 8.0


def test_a_trainers_step_says_whether_its_gradients_are_finite():
    step = SimpleNamespace(all_finite=False)
    assert isinstance(step, StepInfo) and DynamicLossScaler(loss_scale=4.0).update(step) == 2.0


def test_a_saved_scale_goes_on():
    whole, other = DynamicLossScaler(up_scale_window=4), DynamicLossScaler(up_scale_window=4)
    for _ in range(3):
        whole.update(True)
    other.load_state_dict(whole.state_dict())
    assert other.update(True) == whole.update(True) == 2.0**17


def test_a_loop_in_half_precision_trains_as_it_does_in_float32():
    """Gradients too small for float16 reach the weights."""
    torch.manual_seed(0)
    scaler, losses = DynamicLossScaler(up_scale_window=5), []
    model = ORTModule(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(32, 8)
    for _ in range(30):
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean() * 1e-6
        optimizer.zero_grad()
        (loss * scaler.loss_scale).backward()
        all_finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
        if all_finite:
            for parameter in model.parameters():
                parameter.grad /= scaler.loss_scale * 1e-6
            optimizer.step()
        scaler.update(all_finite)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("wrong", [{"loss_scale": 0.5}, {"loss_scale": 2.0**30}, {"up_scale_window": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(OptimizerError, match="out of range"):
        DynamicLossScaler(**wrong)
    with pytest.raises(OptimizerError):
        LossScaler(0.0)
