"""TRL's SFTTrainer around ORTModule: it gives the model a forward with a loss of its own, which is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from onnxtrain import ORTModule

trl = pytest.importorskip("trl", reason="trl is not installed")
pytestmark = pytest.mark.slow
STEPS, VOCABULARY = 3, 100


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **dropout))


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w1", unk_token="w0")


def run(folder: Path, model: Any, **changes: Any) -> Any:
    from datasets import Dataset

    rows = [{"input_ids": torch.randint(2, VOCABULARY, (6 + i % 5,)).tolist()} for i in range(16)]
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"bf16": False, "gradient_checkpointing": False, "use_cpu": True, "report_to": [], "seed": 3} | changes
    arguments = trl.SFTConfig(str(folder), dataset_kwargs={"skip_prepare_dataset": True}, **settings)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    trainer.train()
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_are_eagers_and_come_from_the_graph(tmp_path: Path, checkpointing: bool) -> None:
    found = []
    for wrap in (lambda model: model, ORTModule):
        model = wrap(build())
        trainer = run(tmp_path, model, gradient_checkpointing=checkpointing)
        found.append(
            [entry[n] for entry in trainer.state.log_history if "loss" in entry for n in ("loss", "grad_norm")]
        )
    assert len(found[0]) == 2 * STEPS and found[1] == pytest.approx(found[0], rel=1e-4)
    sessions = model.__dict__["_sessions"]
    assert captures(model) and sum(entry.served for entry in sessions.entries) == STEPS
