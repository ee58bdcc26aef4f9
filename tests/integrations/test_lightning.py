"""Lightning around ``self.model = ORTModule(net)``: losses, precision, checkpoints and resume, against eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_scripts import load_example

from onnxtrain import ORTModule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("lightning")
example = load_example("lightning_fit")
STEPS = 2 * example.EPOCH


def plain(net: torch.nn.Module) -> torch.nn.Module:
    return net


@pytest.mark.parametrize(("precision", "close"), [("32-true", 1e-4), ("bf16-mixed", 5e-2)])
def test_losses_are_eagers(precision: str, close: float, tmp_path: Path) -> None:
    eager, ours = example.Classifier(plain), example.Classifier(ORTModule)
    for module in (eager, ours):
        example.fit(module, tmp_path, STEPS, precision=precision, gradient_clip_val=1.0)
    assert len(ours.losses) == STEPS and ours.losses == pytest.approx(eager.losses, rel=close)
    assert len(ours.validation_losses) == 20 and ours.validation_losses == pytest.approx(
        eager.validation_losses, rel=close
    )
    assert sum(len(s) for s in ours.model.__dict__["_sessions"].values()) == 2, "one for training, one for validation"
    assert ("bf16" in ours.model.graph("captured")) == (precision == "bf16-mixed")


def test_checkpoints_are_the_plain_networks(tmp_path: Path) -> None:
    ours = example.Classifier(ORTModule)
    path = example.fit(ours, tmp_path, 5)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert list(state) == list(example.Classifier(plain).state_dict())
    images, _ = next(iter(example.loader(0, 4)))
    expected = ours.eval().model(images)
    torch.testing.assert_close(example.load_net(path)(images), expected, rtol=1e-4, atol=1e-5)
    loaded = example.Classifier.load_from_checkpoint(path, wrap=plain, weights_only=True).eval()
    torch.testing.assert_close(loaded.model(images), expected, rtol=1e-4, atol=1e-5)


def test_resume_is_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, first, second = (example.Classifier(ORTModule) for _ in range(3))
    example.fit(whole, tmp_path, STEPS, limit_val_batches=0)
    part = example.fit(first, tmp_path, example.EPOCH, limit_val_batches=0)
    example.fit(second, tmp_path, STEPS, resume=part, limit_val_batches=0)
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-6)
