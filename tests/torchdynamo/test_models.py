"""Models of Transformers and frameworks around them, compiled by the backend, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import captures, compiled, gradients_of_a_rank, same_steps
from ranks import Ranks
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

from onnxtrain.errors import ModuleError
from onnxtrain.torchdynamo import accelerate_name, allow_in_accelerate, pieces
from onnxtrain.torchdynamo.piece import forget

pytestmark = pytest.mark.slow
logging.set_verbosity_error()
logging.disable_progress_bar()

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, **STILL}
QUIET = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0, **QUIET)
LLAMA = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    vocab_size=99,
)
T5 = T5Config(
    d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=99, dropout_rate=0.0, decoder_start_token_id=0
)
VIT = ViTConfig(image_size=32, patch_size=8, num_labels=3, **SMALL)
RESNET = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)


def ids(**others: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(99, (3, 10)), **others}


def texts() -> dict[str, Any]:
    return ids(labels=torch.randint(99, (3, 10)))


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(3, (2,))}


MODELS = {
    "bert": (
        lambda: BertForSequenceClassification(BertConfig(vocab_size=99, **SMALL)),
        lambda: ids(labels=torch.ones(3).long()),
    ),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2), texts),
    "llama": (lambda: LlamaForCausalLM(LLAMA), texts),
    "t5": (lambda: T5ForConditionalGeneration(T5), texts),
    "vit": (lambda: ViTForImageClassification(VIT), images),
    "resnet": (lambda: ResNetForImageClassification(RESNET), images),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_optimizer_steps_are_those_of_eager_in_double(name: str) -> None:
    build, batch = MODELS[name]
    eager = build().double()
    ours = copy.deepcopy(eager)
    made = compiled(ours, dynamic=True)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (ours, eager)]
    for _ in range(4):
        given = {n: t.double() if t.is_floating_point() else t for n, t in batch().items()}
        losses = []
        for model, optimizer in zip((made, eager), optimizers, strict=True):
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-7, atol=1e-9)
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)  # Adam divides small gradients by small ones
    assert captures() == len(pieces())


def test_random_numbers_are_those_of_eager_where_nothing_is_skipped() -> None:
    config = BertConfig(vocab_size=99, **{**SMALL, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2})
    model = BertForSequenceClassification(config)
    eager = copy.deepcopy(model)
    made = compiled(model, compute_optimizer=False)
    given = ids(labels=torch.ones(3).long())
    for seed in range(3):
        losses = []
        for run in (made, eager):
            torch.manual_seed(seed)
            losses.append(run(**given).loss)
        torch.testing.assert_close(*losses)


def test_autocast_around_a_model() -> None:
    def build() -> Callable[..., Any]:
        model = GPT2LMHeadModel(GPT2)

        def step(input_ids: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(input_ids=input_ids).logits.float().logsumexp(-1)

        return step

    torch.manual_seed(0)
    made, given = build(), torch.randint(99, (3, 10))
    expected = made(given)
    assert torch.allclose(compiled(made)(given), expected, rtol=0.02, atol=0.02)


def history(folder: Path, **changes: Any) -> tuple[list[float], list[str]]:
    """Losses of a run of Trainer, and the names in its last checkpoint."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=99, **SMALL))
    rows = torch.randint(99, (16, 10), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": int(row[0] > 50)} for row in rows]
    settings = {"max_steps": 6, "logging_steps": 1, "save_steps": 6, "eval_strategy": "steps", "eval_steps": 3}
    own = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    arguments = TrainingArguments(str(folder), **settings, **own, **changes)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    trainer.train()
    plain = BertForSequenceClassification.from_pretrained(folder / "checkpoint-6")
    log = trainer.state.log_history
    return [entry[n] for entry in log for n in ("loss", "eval_loss") if n in entry], list(plain.state_dict())


@pytest.mark.parametrize("name", ["onnxtrain", "onnxrt"])
def test_trainer_by_the_name_of_the_backend(tmp_path: Path, name: str) -> None:
    if name == "onnxtrain":
        allow_in_accelerate()
    ours, names = history(tmp_path / "ours", torch_compile_backend=name)
    assert pieces() and sum(piece.calls for piece in pieces()) >= 6
    eager, expected = history(tmp_path / "eager")
    assert names == expected and len(ours) == len(eager) == 8
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-4, atol=1e-5)


def test_accelerate_by_the_name_of_the_backend() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    allow_in_accelerate()
    allow_in_accelerate()
    assert DynamoBackend("ONNXTRAIN") is DynamoBackend("ONNXTRAIN") and "ONNXTRAIN" in DynamoBackend.list()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="onnxtrain", dynamic=True))
    torch._dynamo.reset()
    eager = torch.nn.Linear(4, 2)
    ours = copy.deepcopy(eager)
    model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), 0.1))
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        loss = model(x).square().mean()
        torch.testing.assert_close(loss, eager(x).square().mean())
        accelerator.backward(loss)
        optimizer.zero_grad()
    assert captures() == 1
    AcceleratorState._reset_state(True)


def test_without_accelerate_there_is_nothing_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "accelerate.utils", None)
    with pytest.raises(ModuleError, match="not installed"):
        accelerate_name.allow_in_accelerate()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x + self.attention(x, x, x, need_weights=False)[0])).relu()


def test_layers_that_are_compiled_each() -> None:
    """Regional compilation: one piece serves all layers of a class, each with its own weights."""
    eager = torch.nn.Sequential(Block(), Block(), Block())
    ours = copy.deepcopy(eager)
    torch._dynamo.reset()
    forget()
    for layer in ours:
        layer.compile(backend="onnxtrain")
    x = torch.randn(2, 5, 8)
    for model in (ours, eager):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
    assert captures() < 3


def test_convolutions_and_statistics() -> None:
    def build() -> torch.nn.Module:
        layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)).double()

    same_steps(build, lambda: (torch.randn(4, 3, 9, 9).double(),))


def test_distributed_data_parallel_has_a_piece_for_each_bucket(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        ours, eager = (ranks(gradients_of_a_rank, is_compiled) for is_compiled in (True, False))
    finally:
        ranks.close()
    for (found, count), (expected, _) in zip(ours, eager, strict=True):
        torch.testing.assert_close(found, expected)
        assert count > 1 and len(found) == 6
