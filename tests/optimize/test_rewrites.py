"""Each rewrite of the forward graph does its work and leaves results and gradients as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import pair, same_step
from rewrites import REWRITES, Rewrite

from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize import optimize, optimize_training
from onnxtrain.options import CAST_STRATEGIES
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
    if rewrite.dtype == ir.DataType.BFLOAT16 and engine == "onnxruntime":
        pytest.skip("onnxruntime has no kernels for bfloat16 on a CPU")
    before, after = rewrite.graph(), rewrite.graph()
    optimize(after, **rewrite.options)
    given = rewrite.tensors()
    expected = _step(rewrite, before, engine if rewrite.exact else "torch", given)
    half = rewrite.dtype != ir.DataType.FLOAT
    exact = rewrite.exact and not (half and engine == "onnxruntime")  # which computes in float32 and rounds elsewhere
    for ours, theirs in zip(_step(rewrite, after, engine, given), expected, strict=True):
        if exact:
            assert torch.equal(ours, theirs)
        else:
            tolerance = 1e-2 if half else 1e-12
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


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


class Mixed(torch.nn.Module):
    """What autocast casts: projections in half, normalization, attention's softmax and the loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.project(self.norm(x)).float().view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        logits = self.out(y.transpose(1, 2).flatten(2))
        return torch.nn.functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Level 1 keeps every bit; level 2 rounds as half precision does; the loss stays in float32."""
    module, x, labels = Mixed(), torch.randn(2, 6, 8), torch.randint(0, 5, (2, 5))
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    nodes: dict[tuple[str, int], int] = {}
    chosen = [("NONE", 1), *((s, n) for s in CAST_STRATEGIES[1:] for n in (1, 2))]
    for strategy, level in chosen:
        wrapped, _ = pair(module, propagate_cast_ops_strategy=strategy, propagate_cast_ops_level=level)
        wrapped.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss, logits = wrapped(x, labels)
        loss.backward()
        assert loss.dtype == torch.float32 and logits.dtype == dtype
        found[strategy, level] = [loss.detach(), logits.detach(), *(p.grad.clone() for p in module.parameters())]
        nodes[strategy, level] = wrapped.graph("captured").count(" = Cast(")
    for key, tensors in found.items():
        for ours, theirs in zip(tensors, found["NONE", 1], strict=True):
            if key[1] == 1:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=2e-2)
    assert nodes["FLOOD_FILL", 1] < nodes["NONE", 1], nodes
