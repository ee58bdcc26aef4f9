"""Train with accelerate: the loop of eager PyTorch and of ORTModule, checkpoint and resume included.

    python examples/accelerate_loop.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py     # on CPUs, too: it runs on these

A small vision transformer with random weights learns the digits of scikit-learn, with gradient accumulation. Half way
the state is saved; a new process, so to say, loads it and goes on, and its losses are those of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from onnxtrain import ORTModule

TOLERANCE = 1e-4  # relative, of one loss
ACCUMULATE = 2  # batches for one step of the optimizer


def build_model(seed: int = 0) -> ViTForImageClassification:
    """A vision transformer for 8x8 grey images, random weights."""
    torch.manual_seed(seed)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "initializer_range": 0.2}
    return ViTForImageClassification(ViTConfig(**size, **off, **image)).train()


def loader(batch: int) -> torch.utils.data.DataLoader:
    """Digits in a fixed order: ``pixel_values`` [batch, 1, 8, 8] and ``labels`` [batch]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]
    return torch.utils.data.DataLoader(rows, batch_size=batch)  # type: ignore[arg-type]


class Run:
    """A model in training under an Accelerator of its own.

    Args:
        wrap: ``ORTModule``, or what leaves the model as it is.
        mixed_precision: ``"no"`` or ``"bf16"``.
    """

    def __init__(self, wrap: Callable[[torch.nn.Module], torch.nn.Module], mixed_precision: str = "no") -> None:
        AcceleratorState._reset_state(True)  # several accelerators in one process; a script has one
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision=mixed_precision
        )
        model = wrap(build_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader(batch=32))
        self.losses: list[float] = []

    def train(self, steps: int, skip: int = 0) -> Run:
        """The usual loop over some batches, after skipping those of an earlier run."""
        for batch, _ in zip(self.accelerator.skip_first_batches(self.loader, skip), range(steps), strict=False):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self

    def save(self, folder: Path) -> Run:
        """Model, optimizer and random numbers, as accelerate writes them."""
        self.accelerator.save_state(str(folder))
        return self

    def load(self, folder: Path) -> Run:
        """Continue from a saved state."""
        self.accelerator.load_state(str(folder))
        return self

    def plain_state(self) -> dict[str, torch.Tensor]:
        """The trained weights, which the plain model loads."""
        return self.accelerator.unwrap_model(self.model).state_dict()


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Relative, over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def compare(steps: int, precision: str) -> bool:
    """Train in eager PyTorch, around an ORTModule, and with a checkpoint half way; whether losses are the same."""
    half = steps // 2 // ACCUMULATE * ACCUMULATE
    eager = Run(lambda model: model, precision).train(steps)
    ours = Run(ORTModule, precision).train(steps)
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # the first process's, for all of them
        first = Run(ORTModule, precision).train(half).save(Path(folder))
        second = Run(ORTModule, precision).load(Path(folder)).train(steps - half, skip=half)
        second.accelerator.wait_for_everyone()
    resumed = first.losses + second.losses
    build_model().load_state_dict(ours.plain_state())

    say = ours.accelerator.print  # in the first process
    say("step         eager     ORTModule       resumed")
    for step, row in enumerate(zip(eager.losses, ours.losses, resumed, strict=True)):
        say(f"{step + 1:4}", *(f"{loss:13.6f}" for loss in row))
    tolerance = TOLERANCE if precision == "no" else 20 * TOLERANCE
    worst = max(largest_difference(losses, eager.losses) for losses in (ours.losses, resumed))
    say(f"largest relative difference of a loss: {worst:.1e}", "SAME" if worst < tolerance else "DIFFERENT")
    return worst < tolerance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="batches; at most 56")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    options = parser.parse_args()
    is_same = compare(options.steps, options.mixed_precision)
    PartialState().destroy_process_group()  # after the models are gone, for which its threads may wait else
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
