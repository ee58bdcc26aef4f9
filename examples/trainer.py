"""Train with transformers.Trainer: eager PyTorch, the wrapped model, and a Trainer that puts the loss into the graph.

A small GPT-2 with random weights learns the bytes of Python's own help texts. All three runs start from the same
weights and see the same batches, so their losses are the same; the checkpoints that Trainer wrote are loaded by the
plain model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from onnxtrain import ModuleWithLoss, ORTModule

TOLERANCE = 1e-4  # relative, of one loss


class HelpTexts(torch.utils.data.Dataset):
    """Pieces of help texts as bytes; ``topic`` is a column that the model does not take, so Trainer drops it."""

    def __init__(self, pieces: int, first: int = 0) -> None:
        texts = [(name, text.encode()[: 24 + 8 * (i % 5)]) for i, (name, text) in enumerate(sorted(topics.items()))]
        self.rows = [
            {"topic": name, "input_ids": torch.tensor(list(piece)), "labels": torch.tensor(list(piece))}
            for name, piece in texts[first : first + pieces]
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest row; padding has no label."""
    columns = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in columns.items()
    }
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


def build_model(layers: int = 2) -> GPT2LMHeadModel:
    """A small GPT-2, one token per byte, random weights."""
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=layers, n_head=4, **off))


def arguments(folder: Path, steps: int, **changes: Any) -> TrainingArguments:
    """What all runs share."""
    chosen: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": steps,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(str(folder), **chosen | changes)


class LossInGraphTrainer(Trainer):
    """Trains through one graph of model and loss; evaluation, prediction and saving use the plain model.

    For one process: DistributedDataParallel would not see the backward pass; there, wrap the model before Trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.with_loss = ORTModule(ModuleWithLoss(self.model, self.compute_loss_func, self.label_smoother))

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of a batch, inside the graph where the model is in training."""
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.with_loss(inputs, return_outputs, num_items_in_batch)


def train(
    model: torch.nn.Module,
    settings: TrainingArguments,
    kind: type[Trainer] = Trainer,
    resume: str | None = None,
    **kwargs: Any,
) -> Trainer:
    """Train a model, wrapped or not, from a checkpoint or from the beginning; writes to ``settings.output_dir``."""
    data = {"train_dataset": HelpTexts(64), "eval_dataset": HelpTexts(8, first=64), "data_collator": collate}
    trainer = kind(model=model, args=settings, **data | kwargs)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """The loss of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Relative, over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def reload(trainer: Trainer) -> GPT2LMHeadModel:
    """The plain model from the checkpoint that Trainer wrote."""
    return GPT2LMHeadModel.from_pretrained(f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "eager": train(build_model(), arguments(Path(folder, "eager"), options.steps)),
            "ORTModule": train(ORTModule(build_model()), arguments(Path(folder, "wrapped"), options.steps)),
            "loss in graph": train(build_model(), arguments(Path(folder, "loss"), options.steps), LossInGraphTrainer),
        }
        plain = {name: reload(run).eval() for name, run in runs.items()}
    print("step", *(f"{name:>14}" for name in runs))
    for step, row in enumerate(zip(*(losses(run) for run in runs.values()), strict=True)):
        print(f"{step + 1:4}", *(f"{loss:14.6f}" for loss in row))
    print("eval", *(f"{run.evaluate()['eval_loss']:14.6f}" for run in runs.values()))

    batch = collate(HelpTexts(4, first=64).rows)
    with torch.no_grad():
        print("load", *(f"{model(**batch).loss.item():14.6f}" for model in plain.values()))
    worst = max(largest_difference(losses(run), losses(runs["eager"])) for run in runs.values())
    print(f"largest relative difference of a loss: {worst:.1e}", "SAME" if worst < TOLERANCE else "DIFFERENT")
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
