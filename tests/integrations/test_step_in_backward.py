"""Frameworks' loops around an optimizer that steps within the backward pass: what they train is what they did."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from example_scripts import load_example
from transformers import GPT2Config, GPT2LMHeadModel, Trainer
from transformers.utils import logging

from onnxtrain import Options, ORTModule
from onnxtrain.errors import OptimizerError
from onnxtrain.optim import step_in_backward

pytestmark = pytest.mark.slow
logging.set_verbosity_error()
logging.disable_progress_bar()
example, lightning_example = load_example("trainer"), load_example("lightning_fit")
STEPS = 4


def run(folder: Path, apart: bool, resume: str | None = None, **changes: Any) -> Trainer:
    """A run of the example's model, wrapped; ``apart`` is how its optimizer steps."""
    wrapped = ORTModule(example.build_model(layers=1))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3, weight_decay=0.1)
    if apart:
        step_in_backward(optimizer)
    made = example.arguments(folder, **{"steps": STEPS, "max_grad_norm": 0.0, **changes})
    data = example.HelpTexts(32)
    trainer = Trainer(wrapped, made, example.collate, data, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_trainer(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = (run(tmp_path / str(apart), apart, save_steps=2, **changes) for apart in (True, False))
    assert same(ours.model, theirs.model)
    assert ours.lr_scheduler.get_last_lr() == theirs.lr_scheduler.get_last_lr()
    norms = [[entry["grad_norm"] for entry in t.state.log_history if "grad_norm" in entry] for t in (ours, theirs)]
    assert math.isnan(norms[0][0]) and norms[0][1:] == norms[1][1:]
    resumed = run(tmp_path / "again", True, resume=str(tmp_path / "False" / "checkpoint-2"), save_steps=2, **changes)
    assert same(resumed.model, theirs.model), "from a checkpoint of the ordinary optimizer"


def test_trainer_that_clips_or_accumulates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptimizerError, match="max_grad_norm=0"):
        run(tmp_path, True, max_grad_norm=1.0)
    with pytest.raises(OptimizerError, match="received a second gradient"):
        run(tmp_path, True, gradient_accumulation_steps=2)


def gpt2(
    apart: bool, clip: bool = False, autocast: bool = False, dropout: float = 0.1, **options: Any
) -> tuple[list[float], torch.nn.Module]:
    """Losses and model of steps with dropout and padding, on batches of several lengths."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    chances = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **chances))
    wrapped = ORTModule(model, options=Options(summary=False, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    limits = {"max_norm": 0.5, "clip": "global"} if clip else {}
    stepper = step_in_backward(optimizer, **limits) if apart else None
    losses = []
    for length in (9, 17, 12):
        ids = torch.arange(4 * length).reshape(4, length) % 97
        mask = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = wrapped(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward() if stepper is None else stepper.backward(loss)
        if clip and stepper is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two passes": {"clip": True},
    "computed again": {"memory_budget": "min"},
    "autocast": {"autocast": True, "cache_casts": True},
    "compared": {"verify": True},
    "onnxruntime": {"backend": "onnxruntime", "dropout": 0.0},  # its random numbers are its own
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_language_model(name: str) -> None:
    ours, theirs = (gpt2(apart, **SETTINGS[name]) for apart in (True, False))
    assert ours[0] == theirs[0] and same(ours[1], theirs[1])


def test_what_is_read_after_the_update_says_so() -> None:
    model = ORTModule(example.build_model(layers=1), options=Options(summary=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_in_backward(optimizer)
    ids = torch.arange(24).reshape(2, 12)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    with pytest.warns(UserWarning, match="lazy_outputs=False"):
        out.logits.sum()


def test_accelerate() -> None:
    from accelerate import Accelerator

    def trained(apart: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = ORTModule(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
        made = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, schedule = accelerator.prepare(
            model, made, torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)
        )
        if apart:
            assert step_in_backward(optimizer).optimizer is made
        for step in range(STEPS):
            x = torch.full((2, 8), float(step))
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return model

    assert same(trained(True), trained(False))


def test_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    sft = load_trl()

    def trained(apart: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        trainer: trl.SFTTrainer = sft.fine_tuning(tmp_path / str(apart), ORTModule(sft.build()), max_grad_norm=0.0)
        trainer.create_optimizer()
        if apart:
            step_in_backward(trainer.optimizer)
        trainer.train()
        return trainer.model

    assert same(trained(True), trained(False))


def load_trl() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("sft_of_tests", Path(__file__).with_name("test_trl.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(tmp_path: Path, precision: Any) -> None:
    class Apart(lightning_example.Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            self.stepper = step_in_backward(optimizer)
            return optimizer

    ours, theirs = (kind(ORTModule) for kind in (Apart, lightning_example.Classifier))
    for module in (ours, theirs):
        lightning_example.fit(module, tmp_path / type(module).__name__, 1, precision=precision)
    assert same(ours, theirs) and ours.losses == theirs.losses and len(ours.losses) > 1
    with pytest.raises(OptimizerError, match="not clipped"):
        lightning_example.fit(Apart(ORTModule), tmp_path, 1, gradient_clip_val=1.0)
