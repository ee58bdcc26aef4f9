"""Memory printed at the phases of a step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from onnxtrain import Options, ORTModule
from onnxtrain.engine import memory_stats

PHASES = ["pre_forward", "post_forward", "pre_backward", "post_backward"]
MIB = 2**20


def net(**options: Any) -> ORTModule:
    module = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 2))
    return ORTModule(module, options=Options(summary=False, **options))


def step(model: torch.nn.Module) -> None:
    model(torch.randn(1024, 64)).sum().backward()


def test_four_phases_of_ten_steps_and_of_powers_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    model = net(print_memory_stats=True)
    for _ in range(20):
        step(model)
    lines = capsys.readouterr().out.splitlines()
    told = [re.match(r"rank-0 step (\d+) memory \((\w+)\) \| resident \d+ MiB, at most \d+ MiB", x) for x in lines]
    assert [(int(m[1]), m[2]) for m in told if m] == [(n, p) for n in (*range(1, 11), 16) for p in PHASES]


def test_what_is_predicted_stands_beside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    model = net()
    step(model)
    lines = capsys.readouterr().out.splitlines()
    report = model.memory_report(torch.randn(1024, 64))
    saved, peak = (f"{size / MIB:.1f} MiB" for size in (report.footprint.saved, report.peak))
    assert lines[1].endswith(f"| tensors since pre_forward: predicted {saved}")
    assert lines[3].endswith(f"| tensors since pre_forward at most: predicted {peak}")
    assert "predicted" not in lines[0] + lines[2]


def test_counted_tensors_stand_beside_what_is_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([(5 * MIB, 6 * MIB), (7 * MIB, 8 * MIB), (7 * MIB, 8 * MIB), (6 * MIB, 9 * MIB)])
    monkeypatch.setattr(memory_stats, "in_use", lambda device: {"allocated": next(counts), "cached": (MIB, 2 * MIB)})
    step(net(print_memory_stats=True))
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "rank-0 step 1 memory (pre_forward) | allocated 5 MiB, at most 6 MiB | cached 1 MiB, at most 2 MiB"
    )
    assert "tensors since pre_forward: 2.0 MiB, predicted" in lines[1]
    assert "tensors since pre_forward at most: 4.0 MiB, predicted" in lines[3]


def test_a_backend_that_cannot_tell_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    step(net(print_memory_stats=True, backend="onnxruntime"))
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 4 and "predicted" not in out


def test_rank_0_alone_and_training_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(print_memory_stats=True)
    with torch.no_grad():
        model(torch.randn(4, 64))
    step(net())
    monkeypatch.setenv("RANK", "1")
    step(net(print_memory_stats=True))
    assert capsys.readouterr().out == ""


def test_the_cuda_allocators_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    keys = {"allocated_bytes": 1, "reserved_bytes": 2, "inactive_split_bytes": 3}
    stats = {f"{k}.all.{w}": n * 10 + (w == "peak") for k, n in keys.items() for w in ("current", "peak")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: called.append("reset"))
    assert memory_stats.in_use("cuda") == {"allocated": (10, 11), "cached": (20, 21), "inactive": (30, 31)}
    memory_stats.reset("cuda:0")
    assert called == ["empty", "reset"]
    assert "resident" in memory_stats.in_use("cpu")


def test_the_peak_begins_anew() -> None:
    large = torch.ones(32 * MIB)
    del large
    memory_stats.reset("cpu")
    now, most = memory_stats.in_use("cpu")["resident"]
    if now is not None:  # Linux
        assert most is not None and now <= most < now + 64 * MIB
