"""Train with Lightning: a LightningModule whose network is plain, and the same with ``self.model = ORTModule(net)``.

A small convolutional network with BatchNorm learns the digits of scikit-learn. The checkpoint that Lightning wrote has
the names of the plain network, so both kinds of LightningModule load it, and so does the network by itself.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule

TOLERANCE = 1e-4  # relative, of one loss
EPOCH = 10  # steps
PREFIX = "model."  # what the LightningModule puts before the network's names


def build_net(seed: int = 0) -> nn.Module:
    """Two convolutions and a linear layer for 8x8 grey images."""
    torch.manual_seed(seed)
    first = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    second = (nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


def loader(first: int, last: int, batch: int = 32) -> torch.utils.data.DataLoader:
    """Images [batch, 1, 8, 8] and digits [batch] in a fixed order."""
    digits = load_digits()
    images = torch.tensor(digits.images[first:last], dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target[first:last]))
    return torch.utils.data.DataLoader(data, batch_size=batch)


class Classifier(lightning.LightningModule):
    """The digits task.

    Args:
        wrap: ``ORTModule``, or what leaves the network as it is.
    """

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.model = wrap(build_net())
        self.losses: list[float] = []
        self.validation_losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, digits = batch
        loss = F.cross_entropy(self.model(images), digits)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        images, digits = batch
        self.validation_losses.append(F.cross_entropy(self.model(images), digits).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


def fit(module: Classifier, folder: Path, epochs: int, resume: Path | None = None, **changes: Any) -> None:
    """Train, validate and write a checkpoint after each epoch, from the beginning or from a checkpoint."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "max_epochs": epochs, "num_sanity_val_steps": 0, **quiet}
    checkpoints = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(**settings | changes, callbacks=[checkpoints])
    trainer.fit(module, loader(0, 32 * EPOCH), loader(1500, 1797), ckpt_path=resume, weights_only=True)


def checkpoint(folder: Path, epochs: int) -> Path:
    """What was written after some epochs."""
    return folder / f"epoch={epochs - 1}.ckpt"


def load_net(path: Path) -> nn.Module:
    """The plain network from a checkpoint that Lightning wrote."""
    state = torch.load(path, weights_only=True)["state_dict"]
    net = build_net(seed=1)
    net.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in state.items()})
    return net.eval()


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Relative, over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help=f"of {EPOCH} steps; at least 2")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    eager, ours, resumed = Classifier(lambda net: net), Classifier(ORTModule), Classifier(ORTModule)
    half = options.epochs // 2
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("eager", "wrapped", "resumed")]
        fit(eager, folders[0], options.epochs)
        fit(ours, folders[1], options.epochs)
        fit(resumed, folders[2], options.epochs, resume=checkpoint(folders[1], half))
        nets = [load_net(checkpoint(f, options.epochs)) for f in folders[:2]]
    continued = ours.losses[: half * EPOCH] + resumed.losses

    print("step         eager     ORTModule       resumed")
    for step, row in enumerate(zip(eager.losses, ours.losses, continued, strict=True)):
        print(f"{step + 1:4}", *(f"{loss:13.6f}" for loss in row))
    images, digits = next(iter(loader(1500, 1797, batch=297)))
    for name, net in zip(("eager", "ORTModule"), nets, strict=True):
        right = (net(images).argmax(-1) == digits).float().mean().item()
        print(f"plain network from the checkpoint of {name}: {right:.1%} of unseen digits")
    worst = max(largest_difference(losses, eager.losses) for losses in (ours.losses, continued))
    print(f"largest relative difference of a loss: {worst:.1e}", "SAME" if worst < TOLERANCE else "DIFFERENT")
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
