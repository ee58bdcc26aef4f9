"""transformers.Trainer around ORTModule, and around a plain model whose loss is in the graph, against eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from example_scripts import load_example
from parity import captures
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback
from transformers.utils import logging

import onnxtrain.integrations
from onnxtrain import ORTModule

pytestmark = pytest.mark.slow
STEPS = 4


example = load_example("trainer")
logging.set_verbosity_error()
logging.disable_progress_bar()


def run(folder: Path, wrapped: bool, *, resume: str | None = None, **changes: Any) -> Trainer:
    """A run of the example's Trainer; ``changes`` of the arguments."""
    model = example.build_model(layers=1)
    loss_in_graph = changes.pop("loss_in_graph", False) and wrapped
    kind = example.LossInGraphTrainer if loss_in_graph else Trainer
    own = {"compute_loss_func": changes.pop("compute_loss_func", None)}
    settings = example.arguments(folder, changes.pop("steps", STEPS), **changes)
    model = ORTModule(model) if wrapped and not loss_in_graph else model
    return example.train(model, settings, kind, resume, **own)


def history(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """A user's loss, without the causal shift."""
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
        num_items_in_batch
    )


CHANGES = {
    "as it is": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "smoothing": {"label_smoothing_factor": 0.1},
    "function": {"compute_loss_func": mean},
    "bf16": {"bf16": True},
}


WRAPPED = ("as it is", "accumulation", "smoothing", "bf16")
IN_GRAPH = ("accumulation", "smoothing", "function", "bf16")


@pytest.mark.parametrize(("case", "loss_in_graph"), [(c, False) for c in WRAPPED] + [(c, True) for c in IN_GRAPH])
def test_losses_gradients_and_evaluation(case: str, loss_in_graph: bool, tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    eager = run(tmp_path, False, **evaluated, **CHANGES[case])
    ours = run(tmp_path, True, loss_in_graph=loss_in_graph, **evaluated, **CHANGES[case])
    close = {"rel": 2e-3 if case == "bf16" else 1e-4}
    assert len(history(eager, "loss")) == STEPS and len(history(eager, "eval_loss")) == 2
    for name in ("loss", "grad_norm", "eval_loss"):
        assert history(ours, name) == pytest.approx(history(eager, name), **close), name
    assert captures(getattr(ours, "with_loss", ours.model)) == (1 if loss_in_graph else 2), "training and evaluation"
    assert ours.predict(example.HelpTexts(4)).predictions.shape == (4, 48, 256)


def test_checkpoints_are_the_plain_models(tmp_path: Path) -> None:
    ours = run(tmp_path, True)
    plain, info = GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    batch = example.collate(example.HelpTexts(4).rows)
    with torch.no_grad():
        expected = plain.eval()(**batch).logits
        torch.testing.assert_close(ours.model.eval()(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    ours.model.save_pretrained(tmp_path / "saved")
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
    assert list(saved) == list(example.build_model(layers=1).state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in ours.model.state_dict().items())


def test_resume_is_the_uninterrupted_run(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", True, save_steps=2)
    resumed = run(tmp_path / "resumed", True, resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert history(resumed, "loss")[2:] == pytest.approx(history(whole, "loss")[2:], rel=1e-6)
    assert captures(whole.model) == captures(resumed.model) == 1, "checkpoints need no other graph"


def test_the_best_model_comes_back(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    ours = run(tmp_path, True, learning_rate=0.5, lr_scheduler_type="constant", **settings)  # it diverges
    found = history(ours, "eval_loss")
    assert ours.state.best_metric == min(found) < found[-1]
    assert ours.evaluate()["eval_loss"] == pytest.approx(min(found), rel=1e-5)


def test_trainer_asks_the_model_for_what_it_is(tmp_path: Path) -> None:
    plain = example.build_model(layers=1)
    wrapped = ORTModule(copy.deepcopy(plain))
    eager, ours = (
        Trainer(m, example.arguments(tmp_path, 1, label_names=n)) for m, n in ((plain, None), (wrapped, None))
    )
    assert ours.label_names == eager.label_names == ["labels"]
    assert ours.model_accepts_loss_kwargs == eager.model_accepts_loss_kwargs
    batch = example.collate(example.HelpTexts(2).rows)
    assert ours.floating_point_ops(batch) == eager.floating_point_ops(batch) > 0
    for trainer in (eager, ours):
        trainer._set_signature_columns_if_needed()
    assert ours._signature_columns == eager._signature_columns and "topic" not in ours._signature_columns
    assert wrapped.num_parameters() == plain.num_parameters()
    assert wrapped.get_input_embeddings() is wrapped.module.transformer.wte
    assert wrapped.main_input_name == "input_ids" and not wrapped.is_gradient_checkpointing
    assert Trainer(wrapped, example.arguments(tmp_path, 1, label_names=["topic"])).label_names == ["topic"]


class Sent(TrainerCallback):
    """Sends logs on, as those for TensorBoard and the like do."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


def test_what_is_skipped_is_logged(tmp_path: Path) -> None:
    """Before the callbacks that send logs on; losses are as without it, and logs of evaluation too."""
    sent = Sent()
    settings = example.arguments(tmp_path, STEPS, eval_strategy="steps", eval_steps=2, save_strategy="no")
    texts = {"train_dataset": example.HelpTexts(16), "eval_dataset": example.HelpTexts(4)}
    model = ORTModule(example.build_model(layers=1))
    trainer = Trainer(model, settings, example.collate, callbacks=[sent], **texts)
    onnxtrain.integrations.TrainerCallback().install(trainer)
    trainer.train()
    logs = [log for log in sent.logs if "loss" in log]
    assert len(logs) == STEPS
    assert all(0 < log["onnxtrain/flops_share"] < 1.1 and log["onnxtrain/memory_bytes"] > 1e6 for log in logs)
    assert all(log["onnxtrain/steps_per_second"] > 0 and log["onnxtrain/eager_calls"] == 0 for log in logs)
    assert history(trainer, "onnxtrain/flops_share") == [log["onnxtrain/flops_share"] for log in logs]
    assert not [name for log in sent.logs if "eval_loss" in log for name in log if name.startswith("onnxtrain/")]
