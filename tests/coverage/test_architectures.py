"""The walk over architectures reports what happened: passes, differences, refusals, crashes and models that hang."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from architectures import MODELS, Outcome, page, parity, walk
from catalogue import ARCHITECTURES, Architecture, small

pytestmark = pytest.mark.slow
FAMILIES = ("text", "vision", "audio", "multimodal")


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    architectures.prepare()


class Given:
    """Stands for a row whose model is made here."""

    def __init__(self, module: type[torch.nn.Module]) -> None:
        self.model, self.build = module.__name__, module

    def batch(self) -> dict[str, Any]:
        return {"x": torch.randn(2, 3)}


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Counts(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = bytearray(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return x * self.weight


class Wrong(Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Wrong.calls += 1  # stands for a graph that computes something else than eager did
        return x * self.weight * Wrong.calls


class Noisy(Linear):
    """In float32 each call has another rounding error, the later ones a larger one."""

    calls, growth = 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = type(self)
        kind.calls += 1
        return x * self.weight * (1 + 1e-3 * kind.growth**kind.calls * kind.calls * (x.dtype == torch.float32))


class Noisier(Noisy):
    calls, growth = 0, 10.0


class Flat(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 0


class Broken(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such size")


class Hangs(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(60)
        return x


class Dies(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(3)


def test_the_catalogue_is_wide_and_its_rows_are_small() -> None:
    assert len(ARCHITECTURES) >= 80 and {a.family for a in ARCHITECTURES.values()} >= set(FAMILIES)
    config = small(architectures.transformers.LlamaConfig, {"num_key_value_heads": 1})
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (32, 2, 1)
    assert config.attention_dropout == 0.0


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ResNetForImageClassification"])
def test_a_model_that_trains_passes(name: str) -> None:
    outcome = parity(ARCHITECTURES[name])
    assert outcome.status == "pass", outcome


@pytest.mark.parametrize(
    ("module", "status", "reason"),
    [
        (Linear, "pass", ""),
        (Counts, "NumberError", "changes the number calls"),
        (Wrong, "differs", "; in float64: the loss is"),
        (Noisier, "differs", "; from float64 by"),
        (Broken, "eager", "no such size"),
        (Flat, "eager", "no gradient to compare"),
    ],
)
def test_each_kind_of_failure_is_told(module: type[torch.nn.Module], status: str, reason: str) -> None:
    outcome = parity(Given(module))  # type: ignore[arg-type]
    assert outcome.status == status and reason in outcome.reason, outcome


def test_rounding_errors_are_judged_in_double_precision() -> None:
    outcome = parity(Given(Noisy))  # type: ignore[arg-type]
    assert (outcome.status, outcome.judged) == ("pass", "float64"), outcome
    name = next(iter(MODELS))
    text = page([dataclasses.replace(outcome, model=name)])
    assert f"| {name} | text | {outcome.reason} in float64 |" in text and "float64 judges" in text


def test_the_families_of_timm_and_the_models_of_torchvision() -> None:
    pytest.importorskip("timm")
    names = [n for n, row in MODELS.items() if row.family == "timm"]
    assert len({n.split(".")[1] for n in names}) >= 60
    kinds = {row.family.removeprefix("torchvision, ") for row in MODELS.values()}
    assert kinds >= {"classification", "segmentation", "video"}
    outcome = parity(MODELS["timm.resnet.test_resnet"])
    assert outcome.status == "pass", outcome
    assert "Of timm's families 0 of 1." in page([Outcome(names[0], "time", "above 240 s")])


def test_processes_that_hang_or_die_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {kind.__name__: Given(kind) for kind in (Hangs, Dies)}
    monkeypatch.setattr(architectures, "MODELS", rows)
    found = {o.model: o.status for o in walk(list(rows), jobs=2, limit=5)}
    assert found == {"Hangs": "time", "Dies": "crash"}


def test_a_walk_goes_on_where_the_results_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {kind.__name__: Given(kind) for kind in (Linear, Dies)}
    for name, row in rows.items():
        row.family = "text"
        assert row.model == name
    monkeypatch.setattr(architectures, "MODELS", rows)
    monkeypatch.setattr(architectures, "PAGE", tmp_path / "page.md")
    results = ["--results", str(tmp_path / "walk.jsonl")]
    assert architectures.main([*results, "--only", "Dies"]) == 1
    assert "not walked this time: Linear" in (tmp_path / "page.md").read_text()
    assert architectures.main([*results, "--at-least", "50"]) == 0
    assert capsys.readouterr().out.count("Dies") == 1, "it is not walked again"
    assert "**1 of 2 pass (50 %).**" in (tmp_path / "page.md").read_text()


def test_the_page_counts_and_lists() -> None:
    names = list(ARCHITECTURES)[:2]
    text = page([Outcome(names[0], "pass", "1e-7"), Outcome(names[1], "CaptureError", "a | b")])
    assert "**1 of 2 pass (50 %).**" in text
    assert f"| {names[1]} | CaptureError | a \\| b |" in text and f"| {names[0]} | text | 1e-7 |" in text
    assert isinstance(ARCHITECTURES[names[0]], Architecture)
