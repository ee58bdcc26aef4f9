"""TRL's trainers around ORTModule: they give the model a forward with a loss of their own, which is captured."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from onnxtrain import ORTModule

trl = pytest.importorskip("trl", reason="trl is not installed")
from datasets import Dataset  # noqa: E402  (trl needs it)

pytestmark = pytest.mark.slow
STEPS, VOCABULARY = 3, 100


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **dropout))


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w1", unk_token="w0")


def settings(**changes: Any) -> dict[str, Any]:
    made = {"max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"}
    return (
        made | {"bf16": False, "gradient_checkpointing": False, "use_cpu": True, "report_to": [], "seed": 3} | changes
    )


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(2, VOCABULARY, (count,)).tolist())


def fine_tuning(folder: Path, model: Any, **changes: Any) -> Any:
    rows = [{"input_ids": torch.randint(2, VOCABULARY, (6 + i % 5,)).tolist()} for i in range(16)]
    arguments = trl.SFTConfig(str(folder), dataset_kwargs={"skip_prepare_dataset": True}, **settings(**changes))
    return trl.SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def preferences(folder: Path, model: Any) -> Any:
    torch.manual_seed(1)
    sides = ("chosen", "rejected")
    rows = [{"prompt": words(3 + i % 3), **{n: f" {words(3 + i % 4)}" for n in sides}} for i in range(16)]
    arguments, data = trl.DPOConfig(str(folder), **settings()), Dataset.from_list(rows)
    return trl.DPOTrainer(model, build(), args=arguments, train_dataset=data, processing_class=tokenizer())


def rewards(folder: Path, model: Any) -> Any:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    torch.manual_seed(1)
    rows = [{"prompt": words(3)} for _ in range(16)]
    arguments = trl.GRPOConfig(str(folder), num_generations=4, max_completion_length=6, beta=0.0, **settings())
    return trl.GRPOTrainer(model, reward, arguments, Dataset.from_list(rows), processing_class=tokenizer())


CASES = {
    "fine-tuning": fine_tuning,
    "fine-tuning, checkpointing": functools.partial(fine_tuning, gradient_checkpointing=True),
    "preferences": preferences,
    "rewards": rewards,
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_eagers_and_come_from_the_graph(tmp_path: Path, case: str) -> None:
    found = []
    for wrap in (lambda model: model, ORTModule):
        model = wrap(build())
        trainer = CASES[case](tmp_path, model)
        trainer.train()
        found.append(
            [entry[n] for entry in trainer.state.log_history if "loss" in entry for n in ("loss", "grad_norm")]
        )
    assert len(found[0]) == 2 * STEPS and found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-7)
    sessions = model.__dict__["_ort_sessions"]
    assert captures(model) and sum(entry.served for entry in sessions.entries) == STEPS
