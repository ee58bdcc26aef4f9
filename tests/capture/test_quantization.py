"""Training with simulated quantization: what torch's own functions and modules compute, as one operator."""

from __future__ import annotations

import copy

import pytest
import torch

from onnxtrain import Options, ORTModule

PER_TENSOR, PER_CHANNEL = torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine


class Quantized(torch.nn.Module):
    """A linear layer whose weight and result are rounded to few levels, some of them outside of the range."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(6, 4), kind
        self.register_buffer("scales", torch.tensor([0.011, 0.02, 0.03, 0.017]))
        self.register_buffer("zeros", torch.tensor([0, 1, -2, 3], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.linear.weight
        if self.kind == "numbers":
            w = PER_TENSOR(w, 0.013, 3, -16, 15)
        if self.kind == "tensors":
            w = PER_TENSOR(w, self.scales[:1], self.zeros[1:2], -16, 15)
        if self.kind == "channels":
            w = PER_CHANNEL(w, self.scales, self.zeros, 0, -16, 15)
        if self.kind == "last axis":
            w = PER_CHANNEL(w.t(), self.scales, self.zeros, 1, -16, 15).t()
        return PER_TENSOR(torch.nn.functional.linear(x, w, self.linear.bias), 0.05, 128, 0, 255)


def compare(eager: torch.nn.Module, x: torch.Tensor, backend: str = "torch", steps: int = 1) -> ORTModule:
    """Outputs, gradients and buffers of some calls as eager has them."""
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(backend=backend))
    for _ in range(steps):
        results = []
        for run in (wrapped, eager):
            given = x.clone().requires_grad_()
            y = run(given)
            y.square().sum().backward()
            results.append([y.detach(), given.grad, *(p.grad for p in run.parameters()), *run.buffers()])
        torch.testing.assert_close(*results)
    return wrapped


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("kind", ["numbers", "tensors", "channels", "last axis"])
def test_functions(kind: str, backend: str) -> None:
    torch.manual_seed(0)
    wrapped = compare(Quantized(kind), torch.randn(5, 6), backend)
    assert wrapped.graph("training").count("FakeQuantGrad(") == 2


def test_zero_points_between_integers_are_of_one_size_each() -> None:
    class Float(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return PER_CHANNEL(x, torch.tensor([0.1, 0.2]), torch.tensor([0.4, -1.3]), 1, -4, 3)

    wrapped = compare(Float(), torch.randn(7, 2))
    for rows in (3, 7):
        x = torch.randn(rows, 2)
        assert torch.equal(wrapped(x), Float()(x))
