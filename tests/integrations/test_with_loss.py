"""ModuleWithLoss against Trainer.compute_loss itself, eager and inside the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, build
from transformers import BatchEncoding, Trainer, TrainingArguments

import onnxtrain
from onnxtrain import ModuleWithLoss, ORTModule

pytestmark = pytest.mark.slow


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = 1) -> torch.Tensor:
    """A user's own loss."""
    logits = outputs.logits.reshape(-1, outputs.logits.shape[-1])
    return torch.nn.functional.cross_entropy(logits, labels.reshape(-1), reduction="sum") / num_items_in_batch


CASES = {
    "own loss": ("bert", {}, {}),
    "own loss with a count": ("gpt2", {}, {}),
    "smoothing": ("bert", {}, {"label_smoothing_factor": 0.2}),
    "smoothing, causal": ("gpt2", {}, {"label_smoothing_factor": 0.2}),
    "function": ("bert", {"compute_loss_func": summed}, {"label_smoothing_factor": 0.2}),
}


def pair(case: str, folder: Path) -> tuple[Trainer, ModuleWithLoss]:
    name, own, arguments = CASES[case]
    model = build(name)
    settings = TrainingArguments(str(folder), use_cpu=True, report_to=[], **arguments)
    trainer = Trainer(model, settings, **own)
    return trainer, ModuleWithLoss(copy.deepcopy(model), trainer.compute_loss_func, trainer.label_smoother)


@pytest.mark.parametrize("wrap", [lambda m: m, ORTModule], ids=["eager", "graph"])
@pytest.mark.parametrize("case", list(CASES))
def test_loss_and_gradients_are_trainers(case: str, wrap: Callable[..., Any], tmp_path: Path) -> None:
    trainer, with_loss = pair(case, tmp_path)
    module = wrap(with_loss)
    for size in (3, 4):
        batch = ARCHITECTURES[CASES[case][0]].batch(size, 6)
        count = torch.tensor(7.0 + size)
        theirs, outputs = trainer.compute_loss(trainer.model, dict(batch), True, count)
        ours, ours_outputs = module(batch, True, count)
        assert "labels" in batch, "the caller's batch stays as it is"
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours_outputs["logits"], outputs["logits"], rtol=1e-4, atol=1e-5)
        theirs.backward()
        module(batch, num_items_in_batch=count).backward()
    for (name, p), (same, q) in zip(module.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert name == same
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def test_batch_encoding_is_accepted() -> None:
    model = build("bert")
    batch = ARCHITECTURES["bert"].batch(2, 5)
    for module in (ModuleWithLoss(model), ORTModule(ModuleWithLoss(copy.deepcopy(model)))):
        torch.testing.assert_close(module(BatchEncoding(batch)), model(**batch).loss, rtol=1e-4, atol=1e-6)


def test_it_is_the_model_to_checkpoints_and_optimizers(tmp_path: Path) -> None:
    model = build("bert")
    wrapped = ORTModule(ModuleWithLoss(model))
    assert onnxtrain.ModuleWithLoss is ModuleWithLoss and wrapped.module.module is model
    assert wrapped.config is model.config
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in model.parameters()]
    torch.optim.SGD(wrapped.parameters(), 0.1).zero_grad()
    wrapped(ARCHITECTURES["bert"].batch(2, 5)).backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.save(wrapped.state_dict(), tmp_path / "weights.pt")
    other = build("bert")
    ModuleWithLoss(other).load_state_dict(torch.load(tmp_path / "weights.pt"))
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_mode_and_copies() -> None:
    model = build("bert")
    with_loss = ModuleWithLoss(model).eval()
    assert not model.training and not with_loss.training and not with_loss.classifier.training
    twin = copy.deepcopy(with_loss.train())
    with torch.no_grad():
        next(twin.parameters()).zero_()
        assert next(twin.module.parameters()).abs().sum() == 0 and next(model.parameters()).abs().sum() > 0
    assert next(twin.double().module.parameters()).dtype == torch.float64


def test_a_model_without_loss_is_an_error() -> None:
    batch = ARCHITECTURES["bert"].batch(2, 5)
    del batch["labels"]
    with pytest.raises(ValueError, match="logits"):
        ModuleWithLoss(build("bert"))(batch)
