"""Whole models: loss, gradients and buffers of three training steps against eager, and both against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, ONE_ATTENTION, build
from parity import captures, check_gradients, check_losses

from onnxtrain import Options, ORTModule

pytestmark = pytest.mark.slow
STEPS = ((2, 7), (3, 9), (1, 5))
TORCH = [(n, a) for n in ARCHITECTURES for a in ("sdpa", "eager") if a == "sdpa" or n not in ONE_ATTENTION]


@pytest.mark.parametrize(("name", "attention"), TORCH)
def test_torch(name: str, attention: str) -> None:
    compare("torch", name, attention)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n != "bloom"])  # its GELU is an autograd.Function
def test_onnxruntime(name: str) -> None:
    compare("onnxruntime", name, "sdpa")


def compare(backend: str, name: str, attention: str) -> None:
    eager = build(name, attention)
    exact = copy.deepcopy(eager).double()
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(backend=backend))
    models = (wrapped, eager, exact)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in models]
    for batch, length in STEPS:
        given = ARCHITECTURES[name].batch(batch, length)
        losses = [m(**(_double(given) if m is exact else given)).loss for m in models]
        for loss in losses:
            loss.backward()
        check_losses(*(loss.item() for loss in losses))
        check_gradients(*(dict(m.named_parameters()) for m in models))
        for ours, theirs in zip(wrapped.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close([*wrapped.parameters()], [*eager.parameters()], rtol=1e-4, atol=1e-6)
        for follower in (wrapped, exact):
            _copy_state(eager, follower)
    assert captures(wrapped) == 1, "a size made a new graph"


def _double(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}


def _copy_state(eager: torch.nn.Module, follower: torch.nn.Module) -> None:
    """Start the next step where eager stands: distances from float64 compare only between equal weights."""
    with torch.no_grad():
        for source, target in zip(eager.state_dict().values(), follower.state_dict().values(), strict=True):
            target.copy_(source)
