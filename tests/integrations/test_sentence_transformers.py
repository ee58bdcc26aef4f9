"""SentenceTransformer's trainer around an ORTModule, the whole model or its transformer, against eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures
from transformers import BertConfig, BertModel, BertTokenizer

from onnxtrain import ORTModule

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
models = pytest.importorskip("sentence_transformers.models")
losses = pytest.importorskip("sentence_transformers.losses")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = pytest.mark.slow
STEPS, BATCH = 4, 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(90))]
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    BertModel(BertConfig(num_attention_heads=4, max_position_embeddings=64, **sizes, **dropout)).save_pretrained(folder)
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def plain(model: Any) -> tuple[Any, Any]:
    return model, None


def whole(model: Any) -> tuple[Any, Any]:
    wrapped = ORTModule(model)
    return wrapped, wrapped


def transformer(model: Any) -> tuple[Any, Any]:
    (name,) = [n for n, child in model[0].named_children() if isinstance(child, BertModel)]
    wrapped = ORTModule(getattr(model[0], name))
    setattr(model[0], name, wrapped)
    return model, wrapped


def train(saved: Path, folder: Path, wrap: Callable[[Any], tuple[Any, Any]]) -> tuple[list[float], Any]:
    parts = [models.Transformer(str(saved)), models.Pooling(32, "mean")]
    model, wrapped = wrap(sentence_transformers.SentenceTransformer(modules=parts, device="cpu"))
    torch.manual_seed(1)
    texts = [" ".join(f"w{i}" for i in torch.randint(90, (3 + n % 6,)).tolist()) for n in range(2 * STEPS * BATCH)]
    rows = datasets.Dataset.from_dict({"anchor": texts[::2], "positive": texts[1::2]})
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=1, save_strategy="no",
        use_cpu=True, report_to=[], seed=3,
    )  # fmt: skip
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = sentence_transformers.SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss)
    trainer.train()
    return [e[n] for e in trainer.state.log_history if "loss" in e for n in ("loss", "grad_norm")], wrapped


@pytest.mark.parametrize("wrap", [whole, transformer])
def test_losses_are_eagers_and_come_from_the_graph(saved: Path, tmp_path: Path, wrap: Callable[..., Any]) -> None:
    expected, _ = train(saved, tmp_path, plain)
    found, wrapped = train(saved, tmp_path, wrap)
    assert len(expected) == 2 * STEPS and found == pytest.approx(expected, rel=1e-4)
    assert captures(wrapped) == 1, "anchors and positives, short and long"
    assert wrapped.__dict__["_ort_sessions"].entries[0].served == 2 * STEPS
