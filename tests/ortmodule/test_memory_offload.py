"""Saved values wait in files where a budget asks for it: the same bits, the peak that was told, and no file is left."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import BackendError, OptionError
from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.ir.graphs import DOMAIN


class Layer(nn.Module):
    """Attention whose products are saved, dropout, and a view that is saved beside its source."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, dropout=0.1, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = self.up(self.norm(x))
        y = torch.tanh(y) * y.transpose(0, 1).sin().transpose(0, 1)
        return x + nn.functional.dropout(self.down(y), 0.1)


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(32) for _ in range(3)), Loss())


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def wrapped(folder: Path, budget: Any = "min", **options: Any) -> Any:
    return ORTModule(network(), options=Options(memory_budget=budget, memory_offload=str(folder), **options))


@pytest.mark.parametrize("budget", [0.6, "min"])
def test_steps_within_a_budget(budget: Any, tmp_path: Path) -> None:
    x = torch.randn(8, 24, 32)
    model, other = wrapped(tmp_path, budget), ORTModule(network(), options=Options(memory_budget=budget))
    report = model.memory_report(x)
    for _ in range(3):
        found = step(model, x)
    assert all(a.equal(b) for a, b in zip(found, step(other, x), strict=True))
    assert list(tmp_path.iterdir()) == []
    del found
    model.zero_grad()
    real = peak_of(lambda: step(model, x) and None)
    assert report.peak == pytest.approx(real, rel=0.01)
    if budget == "min":
        assert report.peak < 0.95 * other.memory_report(x).peak
        assert "waits elsewhere" in str(report) and report.as_dict()["elsewhere"]
        assert "Offload" in model.graph("forward") and "Fetch" in model.graph("backward")


def test_what_it_is_computed_from_is_fetched_as_early_as_it_is_needed(tmp_path: Path) -> None:
    """Of random networks none has other bits, whatever of them is computed again from what was moved."""
    for seed in range(12):
        torch.manual_seed(seed)
        functions = [torch.tanh, torch.exp, torch.sin, nn.functional.gelu, lambda y: y.flip(0), lambda y: y.T @ y]
        chosen = torch.randint(0, len(functions), (10,)).tolist()

        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(24, 24) / 8)

            def forward(self, x: Tensor) -> Tensor:
                past = [x @ self.weight]
                for place, number in enumerate(chosen):  # noqa: B023  (is used at once)
                    past.append(functions[number](past[-1] * 0.3) + past[place // 2] @ self.weight)  # noqa: B023
                return torch.stack(past).square().mean()

        model = Chain()
        found = []
        for options in ({}, {"memory_budget": "min", "memory_offload": str(tmp_path)}):
            made = ORTModule(copy.deepcopy(model), options=Options(summary=False, **options))
            found.append(step(made, torch.eye(24)))
        assert all(a.equal(b) for a, b in zip(*found, strict=True)), seed


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_second_backward_pass_and_parts(create_graph: bool, tmp_path: Path) -> None:
    x = torch.randn(8, 24, 32)
    slopes = []
    for model in (wrapped(tmp_path, segments=3), ORTModule(network())):
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        loss = model(given)
        (slope,) = torch.autograd.grad(loss, given, create_graph=create_graph, retain_graph=True)
        (slope.square().sum() if create_graph else loss).backward()
        slopes.append([slope, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*slopes)


def test_a_plan_is_kept(tmp_path: Path) -> None:
    x, files = torch.randn(8, 24, 32), tmp_path / "files"
    files.mkdir()
    first, second = (wrapped(files, cache_dir=tmp_path / "kept") for _ in range(2))
    found = [(step(model, x), model.memory_report(x)) for model in (first, second)]
    assert all(a.equal(b) for a, b in zip(found[0][0], found[1][0], strict=True))
    kept = [[(c.gain, c.at, c.moved is None) for c in report.chosen] for _, report in found]
    assert kept[0] == kept[1] and found[0][1].peak == found[1][1].peak


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), ()])
def test_a_value_lies_in_memory_as_before(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    for value in (x, x.t() if x.dim() == 2 else x, x.expand(2, *shape)):
        away = LOWERINGS[DOMAIN, "Offload"].function(value, folder=str(tmp_path))
        back = LOWERINGS[DOMAIN, "Fetched"].function(LOWERINGS[DOMAIN, "Fetch"].function(away, device="cpu"))
        assert back.equal(value) and back.dtype == value.dtype
        assert not value.numel() or back.stride() == torch.empty_like(value).stride()


def test_a_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BackendError, match="No space left on device") as caught:
        step(wrapped(tmp_path), torch.randn(8, 24, 32))
    assert "more room" in caught.value.cure
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"memory_offload": "host"}, "within a budget"),
        ({"memory_offload": "/there/is/none", "memory_budget": 0.5}, "no folder"),
        ({"memory_offload": "host", "memory_budget": 0.5, "backend": "onnxruntime"}, "keeps all"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        Options(**options)


def test_the_host_s_memory_is_none_for_a_step_that_runs_there() -> None:
    model = ORTModule(network(), options=Options(memory_budget=0.5, memory_offload="host"))
    with pytest.raises(OptionError, match="runs in the host's memory"):
        model(torch.randn(8, 24, 32))
