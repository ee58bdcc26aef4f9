"""Modules on a CUDA device, where a number that Python made is a tensor on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from onnxtrain import Options, ORTModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class WritesANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] = 1
        y[:, 1:2].fill_(2.0)
        return y


class WithoutTensors(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.numel(), device=x.device).view(x.shape) + torch.ones(4, device=x.device).clamp(max=3)


class OnlyABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.clamp_(max=1).add_(x.detach().mean(0))
        return x / (self.mean.abs() + 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(0).expand(2, -1, -1))[0]


@pytest.mark.parametrize("kind", [WritesANumber, WithoutTensors, OnlyABuffer, Recurrent])
def test_a_step_is_eagers(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    eager = kind().cuda().double()
    ours = copy.deepcopy(eager)
    wrapped = ORTModule(ours, options=Options(summary=False))
    for size in (3, 5):
        x = torch.randn(size, 4, device="cuda", dtype=torch.float64)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = eager(a), wrapped(b)
        expected.square().sum().backward()
        found.square().sum().backward()
        assert found.device == expected.device
        torch.testing.assert_close((found, b.grad), (expected, a.grad))
        for one, other in zip(ours.state_dict().values(), eager.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other)
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


def test_a_module_without_tensors_is_run_in_the_types_of_autocast() -> None:
    wrapped, x = ORTModule(Product(), options=Options(summary=False)), torch.randn(3, 4, device="cuda")
    for enabled in (False, True, False):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            found, expected = wrapped(x), Product()(x)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
