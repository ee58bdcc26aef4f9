"""Lightning around ``self.model = ORTModule(net)``: losses, precision, checkpoints and resume, against eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_scripts import load_example
from parity import captures

from onnxtrain import ORTModule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("lightning")
example = load_example("lightning_fit")
EPOCHS = 2


def plain(net: torch.nn.Module) -> torch.nn.Module:
    return net


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A wrapped network trained for two epochs, and the folder of its checkpoints."""
    module, folder = example.Classifier(ORTModule), tmp_path_factory.mktemp("trained")
    example.fit(module, folder, EPOCHS, gradient_clip_val=1.0)
    return module, folder


def same_losses(ours: Any, eager: Any, epochs: int, close: float) -> None:
    assert len(ours.losses) == epochs * example.EPOCH and len(ours.validation_losses) == epochs * 10
    assert ours.losses == pytest.approx(eager.losses, rel=close)
    assert ours.validation_losses == pytest.approx(eager.validation_losses, rel=close)
    assert captures(ours.model) == 2, "one graph for training, one for validation"


def test_losses_are_eagers(trained: tuple[Any, Path], tmp_path: Path) -> None:
    eager = example.Classifier(plain)
    example.fit(eager, tmp_path, EPOCHS, gradient_clip_val=1.0)
    same_losses(trained[0], eager, EPOCHS, 1e-4)


def test_losses_in_mixed_precision_are_eagers(tmp_path: Path) -> None:
    eager, ours = example.Classifier(plain), example.Classifier(ORTModule)
    for module, name in ((eager, "eager"), (ours, "ours")):
        example.fit(module, tmp_path / name, 1, precision="bf16-mixed")
    same_losses(ours, eager, 1, 5e-2)
    assert "bf16" in ours.model.graph("captured")


def test_checkpoints_are_the_plain_networks(trained: tuple[Any, Path]) -> None:
    module, folder = trained
    path = example.checkpoint(folder, EPOCHS)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert list(state) == list(example.Classifier(plain).state_dict())
    images, _ = next(iter(example.loader(0, 4)))
    expected = module.eval().model(images)
    torch.testing.assert_close(example.load_net(path)(images), expected, rtol=1e-4, atol=1e-5)
    loaded = example.Classifier.load_from_checkpoint(path, wrap=plain, weights_only=True).eval()
    torch.testing.assert_close(loaded.model(images), expected, rtol=1e-4, atol=1e-5)


def test_resume_is_the_uninterrupted_run(trained: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = trained
    resumed = example.Classifier(ORTModule)
    example.fit(resumed, tmp_path, EPOCHS, resume=example.checkpoint(folder, 1), gradient_clip_val=1.0)
    assert resumed.losses == pytest.approx(whole.losses[example.EPOCH :], rel=1e-6)
