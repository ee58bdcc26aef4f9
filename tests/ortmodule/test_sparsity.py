"""What is skipped is said; a loss outside of the module; losses joined to their layer; gradients of tied tables."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES, VOCABULARY, tokens
from parity import pair, same_step
from transformers import BertConfig, BertForMaskedLM, BertModel

from onnxtrain import Options, ORTModule
from onnxtrain.compiler import compile_graph
from onnxtrain.engine import rows
from onnxtrain.errors import BackendError, GradientError, ModuleError, OptionError
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize.rows import COUNTS

LENGTHS = (6, 2, 4)
CONFIG = BertConfig(
    vocab_size=VOCABULARY,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    **SIZES,
)


def batch(labels: bool = True) -> dict[str, torch.Tensor]:
    """Three sequences of 6, 2 and 4 tokens, the second token of each with a label."""
    given = tokens(3, 6)
    given["attention_mask"] = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).long()
    if labels:
        chosen = torch.full((3, 6), -100)
        chosen[:, 1] = given["input_ids"][:, 1]
        given["labels"] = chosen
    return given


def masked_language_model(**options: Any) -> ORTModule:
    """A BERT with every set of rows packed, however small."""
    chosen = Options(density_threshold=0.95, **options)
    return ORTModule(BertForMaskedLM(CONFIG), options=chosen)


def test_the_first_step_says_what_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    model = masked_language_model(log_level="INFO")
    with caplog.at_level(logging.INFO, logger="onnxtrain"):
        model(**batch()).loss.backward()
        model(**batch()).loss.backward()
    text = caplog.text
    assert "label sparsity        on at density 16.7%" in text and "(labels != -100)" in text
    assert "padding elimination   on at density 66.7%" in text
    assert "computed when read    logits" in text and "FLOPs of a step" in text
    steps = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    assert len(steps) == 2
    share = float(steps[1].split("FLOPs of eager = ")[1].split()[0])
    assert 0.05 < share < 0.6 and "16.7% of rows" in steps[1]


def test_the_table_of_densities(capsys: pytest.CaptureFixture[str]) -> None:
    model = masked_language_model(print_input_density=True, summary=False)
    model(**batch())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "STEP" and len(lines) == 3
    assert lines[1].split() == ["1", "LABEL", "labels", "-100", "16.7%", "3", "18", "[1,", "1,", "1]"]
    assert lines[2].split() == ["1", "EMBED", "input_ids", "0", "66.7%", "12", "18", "[6,", "2,", "4]"]


class Pooled(torch.nn.Module):
    """Reads every row, padded ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel(CONFIG, add_pooling_layer=False)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden.mean(1)).square().mean()


def test_explain_names_what_reads_every_row() -> None:
    model = ORTModule(Pooled(), options=Options(density_threshold=0.95))
    model(**batch(labels=False)).backward()
    text = model.explain("sparsity")
    assert "all rows: ReduceMean" in text and "test_sparsity.py" in text and "set 1" not in text
    with pytest.raises(ModuleError, match="nothing to explain about 'rows'"):
        model.explain("rows")


def test_explain_says_which_set_each_value_is_computed_for() -> None:
    model = masked_language_model()
    model(**batch()).loss.backward()
    lines = model.explain("sparsity").splitlines()
    assert lines[1] == "set 1: labels != -100: 3 of 18 rows in the last step, only these are computed"
    assert "12 of 18 rows" in lines[2]
    words = next(line for line in lines if re.search("= Embedding: set 2 ", line))
    file, _, number = words.rpartition("# ")[2].partition(":")
    source = Path(inspect.getfile(BertModel)).read_text().splitlines()
    assert file == "modeling_bert.py" and "word_embeddings(input_ids)" in source[int(number) - 1]
    assert "output logits: computed when it is read" in lines


class Numbered(torch.nn.Module):
    """Returns numbers beside its loss and logits, as many as there are tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BertForMaskedLM(CONFIG)

    def forward(self, **given: torch.Tensor) -> dict[str, Any]:
        made = self.model(**given)
        return {"first": 1, "most": 9, "loss": made.loss, "logits": made.logits}


def test_numbers_among_the_outputs_are_no_places_of_tensors() -> None:
    model = ORTModule(Numbered(), options=Options(density_threshold=0.95, log_level="INFO"))
    model(**batch())["loss"].backward()
    assert "output logits: computed when it is read" in model.explain("sparsity").splitlines()


def test_options() -> None:
    for off in ("compute_optimizer", "sparse_optimizer"):
        model = masked_language_model(**{off: False})
        model(**batch()).loss.backward()
        assert "set 1" not in model.explain("sparsity")
    model = masked_language_model(embedding_sparse_optimizer=False)
    model(**batch()).loss.backward()
    text = model.explain("sparsity")
    assert "set 1: labels" in text and "set 2" not in text
    with pytest.raises(OptionError, match="density_threshold=2"):
        Options(density_threshold=2)


def test_all_rows_are_computed_where_the_backend_cannot_inspect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(graph: ForwardGraph, *args: Any) -> Any:
        if COUNTS in graph.signature.outputs:
            raise BackendError("no kernel for ReduceMax")
        return compile_graph(graph, *args)

    monkeypatch.setattr("onnxtrain.engine.bound.compile_graph", refuse)
    wrapped, eager = pair(BertForMaskedLM(CONFIG), density_threshold=0.95, lazy_outputs=False)
    for _ in range(2):
        same_step(wrapped, eager, **batch(), loss=lambda out: out.loss)
    assert [r.getMessage() for r in caplog.records if "no rows are dropped" in r.getMessage()] == [
        "no rows are dropped: the backend cannot inspect batches: no kernel for ReduceMax"
    ]
    assert "set 1" not in wrapped.explain("sparsity")


class LossAlone(torch.nn.Module):
    """A masked language model whose logits nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BertForMaskedLM(CONFIG)

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        return self.model(**given).loss


def test_rows_are_dropped_where_that_pays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, eager = pair(LossAlone())
    same_step(wrapped, eager, **batch())
    text = wrapped.explain("sparsity")
    assert "too small for the rest to pay" in text and "set 1: labels != -100" in text
    assert "label sparsity        not for batches of this size" in caplog.text
    monkeypatch.setattr(rows, "_START", 0)
    monkeypatch.setattr(rows, "_SEQUENCE", 0)
    monkeypatch.setattr(rows, "_MOVE", 1)
    given = {name: torch.cat([t, t]) for name, t in batch().items()}  # the limits of sizes are kept
    same_step(wrapped, eager, **given)
    assert "set 1: labels != -100: 6 of 36 rows in the last step, only these" in wrapped.explain("sparsity")
    monkeypatch.setattr(rows, "_START", 10**9)
    given = {name: torch.cat([t, t, t]) for name, t in batch().items()}
    same_step(wrapped, eager, **given)
    assert "too small for the rest to pay" in wrapped.explain("sparsity")


def outside(model: Any, given: dict[str, torch.Tensor], masked: bool) -> torch.Tensor:
    """A loss of the mean of hidden states, of tokens alone or of padding too."""
    hidden = model(**given).last_hidden_state
    weight = given["attention_mask"].unsqueeze(-1).float() if masked else torch.ones(3, 6, 1)
    return ((hidden * weight).sum(1) / weight.sum(1)).square().sum()


def encoder() -> BertModel:
    """A BERT without a head."""
    return BertModel(CONFIG, add_pooling_layer=False)


def test_padding_that_a_loss_outside_ignores_is_left_out() -> None:
    wrapped, eager = pair(encoder(), density_threshold=0.95)
    for step in range(3):
        given = batch(labels=False)
        for model in (wrapped, eager):
            model.zero_grad()
            outside(model, given, masked=True).backward()
        dropped = "12 of 18 rows in the last step, only these" in wrapped.explain("sparsity")
        assert dropped == (step > 0)
        for (name, p), q in zip(wrapped.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)
    with pytest.raises(GradientError, match="last_hidden_state received a gradient at padded positions"):
        outside(wrapped, batch(labels=False), masked=False).backward()


@pytest.mark.parametrize("strict", [False, True])
def test_padding_that_a_loss_outside_reads_is_computed(strict: bool) -> None:
    wrapped, eager = pair(encoder(), density_threshold=0.95, strict=strict)
    for _ in range(3):
        same_step(wrapped, eager, **batch(labels=False), loss=lambda out: out.last_hidden_state.square().sum())
    assert "only these" not in wrapped.explain("sparsity")


class Scored(torch.nn.Module):
    """Scores of many classes, and the table of the input is that of the output."""

    def __init__(self, classes: int = 5000) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(classes, 8)
        torch.nn.init.normal_(self.table.weight, std=0.1)
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.linear(self.inner(self.table(ids)), self.table.weight)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_scores_of_many_classes_are_computed_with_their_loss(backend: str) -> None:
    module = Scored()
    wrapped = ORTModule(module, options=Options(backend=backend))
    eager = copy.deepcopy(module)
    for seed in range(2):
        torch.manual_seed(seed)
        ids, labels = torch.randint(0, 5000, (3, 7)), torch.randint(0, 5000, (3, 7))
        labels[:, seed::3] = -100
        same_step(wrapped, eager, ids, labels)
    text = wrapped.graph("training")
    assert "LinearCrossEntropy(" in text and " LinearWithoutBias(" not in text
    assert "AddEmbeddingGrad(" in text and " EmbeddingGrad(" not in text


def test_scores_that_the_user_sees_stay() -> None:
    class Seen(Scored):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            scores = torch.nn.functional.linear(self.inner(self.table(ids)), self.table.weight)
            return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores

    wrapped, eager = pair(Seen(), lazy_outputs=False)
    same_step(wrapped, eager, torch.randint(0, 5000, (2, 3)), torch.randint(0, 5000, (2, 3)), loss=lambda out: out[0])
    assert "LinearCrossEntropy(" not in wrapped.graph("training")


def test_vocabulary_is_the_table_s() -> None:
    assert VOCABULARY < 4096, "the tests of whole models keep scores and loss apart"
