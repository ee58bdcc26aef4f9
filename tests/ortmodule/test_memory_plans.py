"""Memory plans by hand, behaviour.md §6: what is listed runs again, gradients keep every bit, tables name it all."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import pair, same_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import DebugOptions, LogLevel, Options, ORTModule
from onnxtrain.errors import OptionError


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, dropout=0.1, batch_first=True)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down, self.drop = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(3)))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.tokens(ids))).flatten(0, 1), labels.flatten())


class Halves(nn.Module):
    """A convolution in half precision, of which the rest reads the content in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (layer(x).float() for layer in self.layers)
        return first.square().mean() + second.exp().mean()


def words(rows: int = 8, length: int = 16) -> tuple[Tensor, ...]:
    return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(*batch)
    loss.backward()
    return loss


def language(**options: Any) -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(Language(), options=Options(density_threshold=0.0, summary=False, **options))


def again(wrapped: ORTModule, operator: str) -> int:
    """How many nodes of an operator run again."""
    lines = [line for line in wrapped.graph().splitlines() if "recomputed" in line]
    return sum(f"= {operator}(" in line for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        {"memory_plans": ("Gelu+:1:-1",)},
        {"memory_plans": ("Gelu+:1:-1", "Linear+:1:-1", "MatMul+Softmax+:1:2", "Dropout+:1:-1")},
        {"memory_plans": "Gelu+:1:-1", "memory_probe": "0:0"},
        {"memory_plans": "Linear+:1:-1", "memory_probe": "1:1"},
        {"memory_level": 1},
        {"memory_level": 2},
    ],
    ids=str,
)
def test_not_a_bit_of_a_gradient_is_another(options: dict[str, Any]) -> None:
    _same_bits(language(), language(**options))


@pytest.mark.parametrize("options", [{"memory_plans": "Gelu+:1:-1,Linear+:1:2"}, {"memory_level": 1}], ids=str)
def test_a_backend_that_cannot_tell_what_a_step_needs(options: dict[str, Any]) -> None:
    free, bound = language(backend="onnxruntime"), language(backend="onnxruntime", **options)
    _same_bits(free.eval(), bound.eval())  # its dropout does not draw torch's random numbers
    assert "Gelu+:1:-1" in bound.explain("memory")


def _same_bits(free: ORTModule, bound: ORTModule) -> None:
    for _ in range(3):
        given = words()
        assert torch.equal(step(free, given), step(bound, given))
        for (label, a), b in zip(free.named_parameters(), bound.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), label
    assert "recomputed" in bound.graph()


def test_levels_and_counts_lower_the_peak() -> None:
    given = words()
    peaks = []
    for count in (0, 1, 2, 3, -1):
        wrapped = language(memory_plans=(f"Gelu+:1:{count}", f"Linear+:1:{count}"))
        report = wrapped.memory_report(*given)
        peaks.append(report.peak)
        step(wrapped, given)
        assert again(wrapped, "Gelu") == again(wrapped, "Linear") == (3 if count < 0 else count)
        assert len(report.chosen) == 2 * (3 if count < 0 else count)
        assert report.before.saved - report.footprint.saved == sum(c.gain for c in report.chosen)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[3] == peaks[4] < peaks[0]
    layers = language(memory_level=1).memory_report(*given)
    assert layers.peak < 0.6 * peaks[0]


def test_the_first_occurrences_are_taken() -> None:
    wrapped = language(memory_plans="Gelu+:1:1")
    chosen = wrapped.memory_report(*words()).chosen
    assert [c.dropped for c in chosen] == [("gelu",)]
    assert language(memory_plans="Gelu+:0:-1").memory_report(*words()).chosen == ()


def test_a_larger_batch_keeps_the_plans() -> None:
    wrapped = language(memory_plans="Gelu+:1:-1")
    for rows in (4, 16, 8):
        step(wrapped, words(rows))
    report = wrapped.memory_report(*words(32))
    assert len(report.chosen) == 3
    assert "stage" not in str(report)


def test_something_smaller_is_kept() -> None:
    given = (torch.randn(8, 4, 64, dtype=torch.bfloat16),)
    free = ORTModule(Halves(), options=Options(memory_level=0))
    step(free, given)
    plans = {line.split()[0] for line in free.explain("memory").splitlines()[3:]}
    assert plans == {"Cast+:2:-1", "Cast+Exp+:2:-1"}
    bound = ORTModule(copy.deepcopy(free.module), options=Options(memory_plans=tuple(plans)))
    step(bound, given)
    for a, b in zip(free.parameters(), bound.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    report, before = bound.memory_report(*given), free.memory_report(*given)
    assert [len(c.kept) for c in report.chosen] == [1, 1]
    assert report.footprint.saved < before.footprint.saved
    assert not ORTModule(Halves(), options=Options(memory_level=1)).memory_report(*given).chosen
    assert len(ORTModule(Halves(), options=Options(memory_level=2)).memory_report(*given).chosen) == 2
    wrong = ORTModule(Halves(), options=Options(memory_plans="Cast+:1:-1"))
    with pytest.raises(OptionError, match="something smaller has to be saved"):
        wrong(*given)


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"Gellu\+ .*close names: Gelu\+"):
        language(memory_plans="Gellu+:1:-1")(*words())
    with pytest.raises(OptionError, match=r"MatMul\+Softmax\+"):
        language(memory_plans="MatMul+Softmax+:1:-1", memory_probe="0:0")(*words())


def test_a_budget_or_plans() -> None:
    for both in ({"memory_plans": "Gelu+:1:-1"}, {"memory_level": 1}):
        with pytest.raises(OptionError, match=r"memory_budget=0\.5 chooses what is computed again, and so does"):
            Options(memory_budget=0.5, **both)


def test_plans_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(["Gelu+:1:1,Linear+:1:1", "Gelu+:1:2"]))
    monkeypatch.setenv("ORTMODULE_ENABLE_MEMORY_ALLEVIATION", "Dropout+:1:-1")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(path))
    wrapped = language()
    assert wrapped.options.plans_by_hand == ("Gelu+:1:2", "Linear+:1:1")
    step(wrapped, words())
    assert (again(wrapped, "Gelu"), again(wrapped, "Linear")) == (2, 1)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    assert len(language().memory_report(*words()).chosen) > 10
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "0")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(tmp_path / "none.json"))
    with pytest.raises(OptionError, match=r"none\.json"):
        language()


def test_the_table_lists_all_plans() -> None:
    assert "no graph yet" in language().explain("memory")
    wrapped = language(memory_plans="Gelu+:1:2")
    step(wrapped, words(8, 16))
    lines = wrapped.explain("memory").splitlines()
    assert "ids_dim0 = 8, ids_dim1 = 16" in lines[1]
    rows = {line.split()[0]: line.split() for line in lines[3:]}
    assert rows["Gelu+:1:-1"][1:] == ["ON", "3", f"{3 * 8 * 16 * 128 * 4:,}", "1536*ids_dim0*ids_dim1"]
    assert rows["Linear+:1:-1"][1] == "OFF"
    sizes = [int(row[3].replace(",", "")) for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    for name in rows:  # each can be copied
        assert language(memory_plans=name).memory_report(*words()).chosen


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Language(), DebugOptions(LogLevel.DEVINFO), options=Options(memory_plans="Gelu+:1:2"))
    with caplog.at_level(15, "onnxtrain"):
        step(model, words())
        step(model, words(4))
    tables = [r for r in caplog.records if "Saving Symbolic" in r.getMessage()]
    insights = [r for r in caplog.records if r.getMessage().startswith("MemoryInsight")]
    assert len(tables) == len(insights) == len({r.getMessage() for r in tables})
    assert (tables[0].levelno, insights[0].levelno) == (logging.INFO, 15)
    row = next(line.split() for line in insights[0].getMessage().splitlines() if line.split()[0] == "Gelu+")
    assert row == ["Gelu+", "1", "recompute", "2", "2", "3", "100%"]


def test_without_a_plan_the_log_lists_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Language(), DebugOptions(LogLevel.INFO))
    with caplog.at_level(logging.INFO, "onnxtrain"):
        step(model, words())
    assert any("Gelu+:1:-1" in r.getMessage() and "OFF" in r.getMessage() for r in caplog.records)
    assert "recomputed" not in model.graph()


def test_layers_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), options=Options(memory_level=1))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        model(torch.randn(4, 8)).sum().backward()
    assert "no layer of a transformer was found" in caplog.text


def test_checkpoints_beside_plans(caplog: pytest.LogCaptureFixture) -> None:
    class Both(Language):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = checkpoint(self.blocks[0], self.tokens(ids), use_reentrant=True)
            return nn.functional.cross_entropy(self.head(self.blocks[1](x)).flatten(0, 1), labels.flatten())

    for kept in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "onnxtrain"):
            step(ORTModule(Both(), options=Options(memory_plans="Gelu+:1:-1", keep_checkpoints=kept)), words())
        assert ("drop the checkpoints" in caplog.text) == kept


def test_a_second_derivative_and_rows_that_are_left_out() -> None:
    class Masked(Language):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.head(self.blocks(self.tokens(ids)))
            return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=-100)

    wrapped, eager = pair(Masked().eval(), memory_plans="Gelu+:1:-1", density_threshold=0.9)
    for kept in (0.2, 1.0, 0.4):
        ids, labels = words()
        labels[torch.rand(labels.shape) > kept] = -100
        same_step(wrapped, eager, ids, labels)
    smooth, plain = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double(), memory_plans="Tanh+:0:-1")
    for model in (smooth, plain):
        x = torch.ones(4, 8, dtype=torch.double, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    for a, b in zip(smooth.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128
    )
    ids = torch.randint(1, 100, (8, 32))
    return BertForSequenceClassification(config), {"input_ids": ids, "labels": torch.randint(0, 2, (8,))}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    ids = torch.randint(0, 100, (8, 32))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("build", [bert, gpt2])
def test_models_of_transformers(build: Any) -> None:
    torch.manual_seed(0)
    model, batch = build()
    free = ORTModule(copy.deepcopy(model), options=Options(summary=False, density_threshold=0.0))
    whole = free.memory_report(**batch)
    gradients = _gradients(free, batch)
    names = [line.split()[0] for line in free.explain("memory").splitlines()[3:]]
    for options, share in (({"memory_plans": ",".join(names[:2])}, 0.95), ({"memory_level": 1}, 0.65)):
        bound = ORTModule(copy.deepcopy(model), options=Options(summary=False, density_threshold=0.0, **options))
        report = bound.memory_report(**batch)
        assert report.peak < share * whole.peak
        assert all(map(torch.equal, gradients, _gradients(bound, batch)))


def _gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        model(**batch).loss.backward()
    return [p.grad for p in model.parameters()]
