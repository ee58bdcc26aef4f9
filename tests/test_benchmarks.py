"""What the benchmarks train on and what they measure, where the answer is known."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import all as everything
from benchmarks import gpu, measure, page, run, start
from benchmarks.measure import Result, Variant, disagreement, same_data
from benchmarks.workloads import PRESETS, WORKLOADS, Size, batches, composition

SMALL = Size(layers=1, hidden=64, batch=16, length=64, valid_ratio=0.5, vocabulary=100)


class Chain(nn.Module):
    """Two products whose activations are larger than their weights; the loss is the sum."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.second(self.first(x).sigmoid()).sum())


def test_peak_of_eager_is_what_is_alive_at_once() -> None:
    rows, width, inner = 2048, 64, 512
    variant = Variant("eager", Chain(width, inner), "float32")
    batch = {"x": torch.randn(rows, width)}
    for _ in range(2):  # a gradient that is left from before would hide that it is allocated
        variant._loss(batch).backward()
        variant.measure_peak(batch)
    assert variant.result.peak is not None
    hidden, weight = 4 * rows * inner, 4 * width * inner
    # alive at most: the sigmoid's output (saved), its gradient, and the gradient of what it was taken of; then the
    # gradient of the second weight, and a few small ones: the gradient of the output is one number, expanded
    least = 3 * hidden + weight
    assert least <= variant.result.peak <= least + 4 * rows * width + weight + 4096


def test_gradients_of_parameters_are_part_of_the_peak() -> None:
    width, inner = 512, 2048
    variant = Variant("eager", Chain(width, inner), "float32")
    variant.measure_peak({"x": torch.randn(2, width)})
    gradients = 2 * 4 * width * inner
    assert variant.result.peak is not None
    assert gradients <= variant.result.peak <= 1.1 * gradients


@pytest.mark.parametrize(("workload", "share"), [("bert_mlm", 0.15), ("gpt2_sft", 0.3), ("llama_sft", 0.5)])
@pytest.mark.parametrize("stated", [0.0, 0.6])
def test_shares_of_padding_and_of_labels(workload: str, share: float, stated: float) -> None:
    data = batches(WORKLOADS[workload], dataclasses.replace(SMALL, labels=stated), 20, seed=0, grouped=False)
    found = composition(data)
    assert found is not None
    assert found.labels / found.tokens == pytest.approx(stated or share, abs=0.03)
    assert found.padding == pytest.approx(0.5, abs=0.05)
    assert all(bool(((b["labels"] == -100) | (b["attention_mask"] == 1)).all()) for b in data)
    grouped = composition(batches(WORKLOADS[workload], dataclasses.replace(SMALL, labels=stated), 20, 0, grouped=True))
    assert grouped is not None and grouped.padding < 0.1


def test_an_answer_is_the_end_of_its_row() -> None:
    size = dataclasses.replace(SMALL, labels=0.01)
    for batch in batches(WORKLOADS["gpt2_sft"], size, 5, seed=0, grouped=False):
        last = batch["attention_mask"].sum(1) - 1
        labelled = batch["labels"] != -100
        assert labelled.gather(1, last[:, None]).all(), "the last token has a label, however small the share"
        assert labelled.sum() == len(last)


@pytest.mark.parametrize("workload", [n for n in WORKLOADS if n not in ("resnet", "unet", "mlp")])
def test_every_dropout_of_a_model_has_the_stated_chance(workload: str) -> None:
    model = WORKLOADS[workload].build(dataclasses.replace(SMALL, dropout=0.25))
    chances = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
    chances |= {m.dropout for m in model.modules() if isinstance(m, nn.RNNBase)}
    stated = getattr(model, "config", None)
    config = {v for k, v in stated.to_dict().items() if k in ("attention_dropout", "attn_pdrop")} if stated else set()
    assert chances <= {0.25} and config <= {0.25} and chances | config


def test_ratios_are_to_the_same_data() -> None:
    results = [Result(n) for n in ("eager", "torch", "torch-off-grouped", "eager-grouped")]
    assert same_data("eager", results[1], results) is results[0]
    assert same_data("eager", results[2], results) is results[3]
    assert same_data("compile", results[1], results) is None
    results[3].error = "failed"
    assert same_data("eager", results[2], results) is None


def test_dropout_is_compared_in_the_mean() -> None:
    eager, other = Result("eager", losses=[2.0, 2.2, 2.4]), Result("torch", losses=[2.4, 2.2, 2.0])
    assert "at step 1" in disagreement([eager, other], "float32")
    assert not disagreement([eager, other], "float32", dropout=0.1)
    other.losses = [2.3, 2.5, 2.7]
    assert "torch has loss 2.5" in disagreement([eager, other], "float32", dropout=0.1)
    other.losses = [math.nan] * 3
    assert disagreement([eager, other], "float32", dropout=0.1)


def test_a_preset_is_changed_by_what_is_stated() -> None:
    options = run.parse(["--preset", "skip", "--layers", "2", "bert_classify", "dense"])
    assert list(options.runs) == ["bert_classify", "dense"]
    assert options.runs["dense"].size == dataclasses.replace(PRESETS["skip"]["dense"].size, layers=2)
    assert options.runs["dense"].variants == PRESETS["skip"]["dense"].variants
    assert run.parse(["vit", "--variants", "eager"]).runs["vit"].variants == ("eager",)
    for wrong in ([], ["unknown"], ["vit", "--variants", "fast"]):
        with pytest.raises(SystemExit):
            run.parse(wrong)


@pytest.mark.slow
def test_a_run_ends_in_tables_and_json(tmp_path: Path) -> None:
    sizes = [
        "--layers",
        "1",
        "--hidden",
        "64",
        "--length",
        "64",
        "--batch",
        "16",
        "--vocabulary",
        "50",
        "--dropout",
        "0",
    ]
    names = "eager,checkpoint,torch,torch-0.9,torch-min,eager-grouped,torch-grouped"
    variants = ["--variants", names, "--valid-ratio", "0.5"]
    steps = ["--steps", "2", "--warmup", "1", "--json", str(tmp_path / "found.json")]
    assert run.main(["bert_mlm", *sizes, *variants, *steps]) == 0
    found = {r["name"]: r for r in json.loads((tmp_path / "found.json").read_text())[0]["results"]}
    assert found["torch-min"]["peak"] <= found["torch-0.9"]["peak"] < found["torch"]["peak"]
    assert found["torch-min"]["weights"] == found["torch"]["weights"] != found["eager"]["weights"]


def test_names_of_variants() -> None:
    assert all(map(measure.is_variant, (*measure.KINDS, "torch-min", "torch-0.5-grouped", "compile-0.25")))
    assert not any(map(measure.is_variant, ("torch-", "eager-0.5", "checkpoint-min", "fast")))
    assert not measure.is_budget("torch-off") and not measure.is_budget("torch-whole-grouped")


def test_other_weights_than_without_a_budget_are_told() -> None:
    free, fitted = Result("torch", weights=1), Result("torch-0.5", weights=2)
    assert "torch-0.5 has other weights" in disagreement([free, fitted], "float32")
    assert not disagreement([free, dataclasses.replace(fitted, weights=1)], "float32")


@pytest.mark.slow
def test_the_page_tells_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (("PAGE", "benchmarks.md"), ("FOLDER", "benchmarks"), ("RESULTS", "benchmarks/results.json")):
        monkeypatch.setattr(page, name, tmp_path / path)
    monkeypatch.setattr(
        start, "measure", lambda name, variant, layers, cache: {"wall": 1.0 + len(variant), "loss": 2.0}
    )
    monkeypatch.setattr(start, "report", lambda name, found: "")
    sizes = ["--layers", "1", "--hidden", "64", "--length", "32", "--batch", "8", "--warmup", "1"]
    variants = ["--variants", "eager,eager-default,torch,eager-grouped,torch-grouped"]
    runs = ["--runs", "mlp", "llama_lora, 60 % tokens, half of them labels", "--starts", "bert"]
    assert everything.main([*runs, "--steps", "2", *sizes, *variants]) == 0
    text, kept = page.PAGE.read_text(), json.loads(page.RESULTS.read_text())
    mlp, lora = kept["steps"]
    for result in (*mlp["results"], *lora["results"]):
        assert f"| {1000 * result['median']:.1f} ms |" in text and not result["error"]
    ours = [r for run_ in kept["steps"] for r in run_["results"] if r["name"].startswith("torch")]
    assert len(ours) == 4 and all(0 < r["roofline"] < 1.5 for r in ours)
    slower = [r for r in ours if r["speed"] < 1]
    assert text.count("x of eager PyTorch's speed") == len(slower)
    assert "| bert | 6.00 s | +2.00 s | +4.00 s | +1.00 s |" in text
    assert (page.FOLDER / "ratios.svg").exists() and (page.FOLDER / "starts.svg").exists()
    before = text
    assert everything.main(["--page"]) == 0 and page.PAGE.read_text() == before


MARKED = """
import time

import pytest

pytestmark = pytest.mark.gpu


def test_right():
    pass


def test_wrong():
    assert False, "it is"


def test_long():
    time.sleep({seconds})
"""


@pytest.mark.slow
def test_what_wants_a_gpu_is_told_even_where_the_time_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    for seconds, summary in ((0, "1 failed, 2 passed"), (600, "1 failed, 1 passed")):
        (tmp_path / "tests" / "test_marked.py").write_text(MARKED.format(seconds=seconds))
        found = gpu.tested(1, 20.0, tmp_path / "out" / "log.txt")
        assert not found["passed"] and summary in found["summary"]
        assert ["test_wrong" in line for line in found["failed"]] == [True]


def test_a_run_for_which_no_time_is_left_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "1", "--hidden", "16", "--batch", "4", "--steps", "1", "--warmup", "1", "--seconds", "0"]
    kept = tmp_path / "gpu.json"
    given = ["--device", "cpu", "--only", "steps", "--runs", "mlp", "--variants", "eager", "--json", str(kept)]
    assert gpu.main([*given, *small]) == 0
    assert json.loads(kept.read_text())["steps"] == [] and "mlp is left out" in capsys.readouterr().out
    assert gpu.main([*given, *small, "--seconds", "60"]) == 0
    (run_,) = json.loads(kept.read_text())["steps"]
    assert (run_["settings"]["dtype"], run_["facts"]["device"]) == ("bfloat16", "cpu")
