"""The report of a run: what it tells is what happened, on a page that stands alone."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import BROWSERS, installed, look_at
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from onnxtrain import Options, ORTModule
from onnxtrain.engine.module_times import by_module
from onnxtrain.errors import OptionError

WORDS, TOKENS, ROWS = 1000, 64, 32


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes))


def padded() -> dict[str, Tensor]:
    """Texts of many lengths, of which few words are to be guessed."""
    torch.manual_seed(1)
    ids = torch.randint(1, WORDS, (ROWS, TOKENS))
    mask = (torch.arange(TOKENS) < torch.randint(8, TOKENS, (ROWS, 1))).long()
    labels = torch.where(torch.rand(ROWS, TOKENS) < 0.15, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Taking(nn.Module):
    """Takes the next number of an iterator, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors = nn.Linear(4, 2), iter([1] * 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * next(self.factors))


class Shape(html.parser.HTMLParser):
    """Whether elements are closed in their order, and what a page refers to, and says."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.wrong += self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def trained() -> tuple[ORTModule, dict[str, Tensor], torch.optim.Optimizer]:
    """A model that was verified and trained for some steps, its batch and its optimizer."""
    model, batch = ORTModule(bert(), options=Options(verify=True)), padded()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, batch, optimizer


@pytest.fixture(scope="module")
def report(trained: tuple[ORTModule, dict[str, Tensor], torch.optim.Optimizer]) -> Any:
    model, batch, optimizer = trained
    return model.report(None, batch, optimizer=optimizer)


def test_it_tells_what_happened(report: Any, trained: tuple[ORTModule, dict[str, Tensor], Any]) -> None:
    model, batch, _ = trained
    (graph,) = report.graphs
    assert report.name == "BertForMaskedLM" and not report.left_out
    assert (graph.mode, graph.served, [*graph.reasons]) == ("training", 3, ["it is the first call"])
    linear = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    assert sum(o.operator == "Linear" for o in graph.operators) == linear
    named = dict(model.named_parameters(remove_duplicate=False))
    read = {id(named[name]) for o in graph.operators for name in o.reads if name in named}
    assert read == {id(p) for p in model.parameters()}
    assert any(o.source.startswith("modeling_bert.py:") for o in graph.operators)
    needed, total = int((batch["labels"] != -100).sum()), ROWS * TOKENS
    assert (graph.rows.sets[0].held, graph.rows.sets[0].total) == (needed, total)
    ours, eager = report.time.work
    assert 0 < ours < 0.8 * eager
    assert abs(report.time.peak - report.memory.peak) < 0.01 * report.memory.peak
    assert report.time.optimizer and report.verification is model.verification


def test_operators_are_told_under_their_modules(report: Any, trained: tuple[ORTModule, Any, Any]) -> None:
    model, _, _ = trained
    modules = {n: f"{type(m).__module__}.{type(m).__qualname__}" for n, m in model.named_modules()}
    (graph,) = report.graphs
    assert all(modules[name] == kind for o in graph.operators for name, kind in o.modules)
    own = {name for o in graph.operators for name in o.reads if name.endswith("query.weight")}
    assert own == {name for name, _ in model.named_parameters() if name.endswith("query.weight")}  # of either layer
    for operator in graph.operators:
        around = [name for name, _ in operator.modules]
        assert all(inner.startswith(f"{outer}.") for outer, inner in itertools.pairwise(around))
        if operator.operator == "Linear" and "decoder" not in operator.reads[0]:  # whose weight is the embedding's
            assert around[-1] in {*(name.rpartition(".")[0] for name in operator.reads), "cls.predictions.decoder"}


def test_time_is_told_by_module(report: Any) -> None:
    modules = {m.name: m for m in by_module(report.time.costs)}
    layers, queries = modules["bert.encoder.layer.*"], modules["bert.encoder.layer.*.attention.self.query"]
    assert layers.names == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    assert layers.depth == 2 and layers.kind.endswith(".BertLayer")
    assert {c.part for c in queries.costs} == {"forward", "backward"}
    for module in modules.values():
        assert module.seconds >= sum(part.seconds for part in module.within.values()) * (1 - 1e-9)
    whole = sum(m.seconds for m in modules.values() if not m.depth)
    assert 0 < queries.seconds < layers.seconds < whole <= report.time.operators * (1 + 1e-9)
    assert "      layer.*: BertLayer (2 of them)\n" in str(report.time)


def test_the_page_stands_alone(report: Any, tmp_path: Path) -> None:
    """Nothing is loaded from elsewhere; elements are closed; pictures and tables say what they are."""
    report.losses = {"eager": [3.0, 2.0, float("nan")], "ORTModule": [3.0, 2.0, 1.0]}
    page = report.save(tmp_path / "run.html").read_text()
    shape = Shape(page)
    assert not shape.wrong
    assert not [(tag, a) for tag, a in shape.attributes if {"src", "href"} & {*a}]
    assert ("html", {"lang": "en"}) in shape.attributes and page.count("<h1>") == 1
    assert all(a.get("aria-label") for tag, a in shape.attributes if tag == "svg")
    assert all(a.get("scope") == "col" for tag, a in shape.attributes if tag == "th")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    parts = ["Losses", "What was captured", "What the start took", "What each pass did", "Which rows are computed"]
    assert headings == [*parts, "Time of a step", "Memory of a step", "Beside eager PyTorch"]
    assert "modeling_bert.py:" in page and "bert.encoder.layer.1.attention.self.query.weight" in page
    assert "<summary>bert.encoder.layer.1.attention.self.query: Linear, 1 Linear</summary>" in page
    assert "labels != -100" in page and "<polyline" in page


def test_json_and_text_tell_the_same(report: Any, tmp_path: Path) -> None:
    told = json.loads(report.save(tmp_path / "run.json").read_text())
    assert told["graphs"][0]["phases"] == report.graphs[0].phases and told["time"]["peak"] == report.time.peak
    assert told["memory"]["peak"] == report.memory.peak and len(told["verification"]) > 10
    text = report.save(tmp_path / "run.txt").read_text()
    assert text == str(report)
    assert all(fact in text for _, fact in report.facts)


def test_a_notebook_shows_the_page(report: Any, tmp_path: Path) -> None:
    for told in (report, report.memory, report.time):
        shown = Shape(told._repr_html_())
        ((tag, attributes),) = shown.attributes
        assert tag == "iframe" and not shown.wrong
        assert attributes["srcdoc"] == told.save(tmp_path / "run.html").read_text()


def test_the_latest_batch_is_told_of_as_long_as_somebody_holds_it() -> None:
    model = ORTModule(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.randn(5, 8)
    model(x).sum().backward()
    held = model.report()
    assert held.memory.sizes == {"input_dim0": 5} and not held.left_out
    del x
    gone = model.report()
    assert gone.memory is None and gone.time is None and "give a batch" in gone.left_out
    assert gone.left_out in str(gone) and len(gone.graphs) == 1


def test_numbers_to_be_logged(trained: tuple[ORTModule, dict[str, Tensor], Any], report: Any) -> None:
    model, _, _ = trained
    found = model.metrics()
    ours, eager = report.time.work  # of the same batch
    assert found["flops_share"] == ours / eager < 0.8
    assert (found["graphs"], found["calls"], found["eager_calls"]) == (1, 3, 0)
    assert found["start_seconds"] == pytest.approx(report.graphs[0].seconds, rel=0.5)
    assert ORTModule(nn.Linear(2, 2)).metrics() == {}


def test_nothing_is_changed_by_it() -> None:
    model = ORTModule(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)))
    x = torch.randn(5, 8)
    model(x).sum().backward()
    before = [t.clone() for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]
    state = torch.get_rng_state()
    model.report(None, x)
    after = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_before_the_first_call_and_in_eager_pytorch() -> None:
    model = ORTModule(nn.Linear(4, 4))
    assert not model.report().graphs and "0 calls, 0 graphs" in str(model.report())
    assert model.report(None, torch.randn(3, 4)).memory.peak > 0
    eager = ORTModule(Taking(), options=Options(fallback="eager"))
    eager(torch.randn(3, 4))
    found = eager.report()
    assert "eager PyTorch" in found.told[0] and not found.graphs


def test_a_backend_that_cannot_tell_is_said() -> None:
    model = ORTModule(nn.Linear(4, 1), options=Options(backend="onnxruntime"))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    found = model.report()
    assert found.graphs and "OnnxRuntime cannot tell" in found.left_out and found.left_out in str(found)


def test_a_name_that_says_no_form_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\.html"):
        ORTModule(nn.Linear(4, 4)).report(tmp_path / "run.pdf", torch.randn(3, 4))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(report: Any, tmp_path: Path, scheme: str) -> None:
    """What is drawn has a size, nothing is wider than the page, and text stands out from what is behind it."""
    path = report.save(tmp_path / "run.html")
    found = look_at(installed(*BROWSERS), path, tmp_path, tmp_path / "profile", scheme=scheme, width=900)
    assert not found["faint"] and not found["nameless"] and not found["wordless"] and found["wide"] <= 0, found
    assert found["pictures"] >= 2 and found["smallest"] > 50, found
    assert (found["paper"] > 0.5) == (scheme == "light"), found
