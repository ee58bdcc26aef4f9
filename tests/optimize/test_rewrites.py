"""Each rewrite of the forward graph does its work and leaves results and gradients as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parity import pair, same_step
from rewrites import REWRITES, Rewrite

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize import optimize, optimize_training
from onnxtrain.plan import make_plan


@pytest.mark.parametrize("name", REWRITES)
def test_operators_that_are_left(name: str) -> None:
    graph = REWRITES[name].graph()
    optimize(graph, **REWRITES[name].options)
    assert " ".join(n.op_type for n in graph.model.graph) == REWRITES[name].after


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("name", REWRITES)
def test_results_and_gradients_stay(name: str, engine: str) -> None:
    rewrite = REWRITES[name]
    before, after = rewrite.graph(), rewrite.graph()
    optimize(after, **rewrite.options)
    given = rewrite.tensors()
    expected = _step(rewrite, before, engine if rewrite.exact else "torch", given)
    for ours, theirs in zip(_step(rewrite, after, engine, given), expected, strict=True):
        if rewrite.exact:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def _step(rewrite: Rewrite, graph: ForwardGraph, engine: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, then the gradients of all inputs."""
    training = build_gradient(graph)
    optimize_training(training)
    executable = backend(engine).compile(make_plan(training))
    outputs, saved = executable.forward([t.clone() for t in given])
    outputs = [_tensor(y) for y in outputs]
    seeds = [torch.sin(torch.arange(y.numel())).reshape(y.shape).to(y.dtype) for y in outputs]
    gradients = dict(zip(executable.plan.gradients, executable.backward(saved, seeds), strict=True))
    return [*outputs, *(_tensor(gradients[n]) for n in rewrite.inputs)]


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))


class LoraProjection(torch.nn.Module):
    """Queries and values of one projection get an update of low rank, as LoRA's merged linear layers compute it."""

    def __init__(self, groups: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.down = torch.nn.Linear(8, 4 * groups, bias=False)
        self.up = torch.nn.Conv1d(4 * groups, 6 * groups, 1, groups=groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x).transpose(-2, -1)).transpose(-2, -1)


class Rotary(torch.nn.Module):
    """Rotary embeddings of queries and keys that come from one packed projection, for a single head."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.project(x).view(x.shape[0], x.shape[1], 2, 1, 8)
        q, k = (self.turned(packed[:, :, i].transpose(1, 2)) for i in range(2))
        return (q @ k.transpose(-1, -2)).softmax(-1).squeeze(1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * 0.6 + half * 0.8


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize(
    ("module", "gone"),
    [(LoraProjection(), "Conv("), (LoraProjection(1, False), "Conv("), (LoraProjection(9), ""), (Rotary(), "Gather(")],
)
def test_module(module: torch.nn.Module, gone: str, engine: str) -> None:
    wrapped, eager = pair(module, backend=engine)
    for rows in (2, 3):
        same_step(wrapped, eager, torch.randn(rows, 5, 8, requires_grad=True))
    assert not gone or gone not in wrapped.graph("captured")
