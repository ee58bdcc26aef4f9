"""A training script written for onnxruntime-training; to run it on onnxtrain only the import lines were changed.

The old lines stand in comments above the new ones. The script trains a digit classifier with ORTModule and, unless
told not to, the same in plain PyTorch, and compares: training, gradient accumulation, automatic mixed precision,
evaluation, saving and loading, ONNX dumps of every stage, statistics of activations.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

# from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule


class NeuralNet(nn.Module):
    """Three linear layers; the loss is computed inside, where labels are given."""

    def __init__(self, input_size: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size, bias=False)  # the norm takes it away
        self.norm = nn.BatchNorm1d(hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)
        self.fc3 = nn.Linear(hidden_size, num_classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        out = F.relu(self.norm(self.fc1(x)))
        out = F.gelu(self.fc2(out)) + out
        logits = self.fc3(out)
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits, labels), logits

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """A method of the user's own: still there on the wrapped model."""
        return self(x)[0].argmax(-1)


def get_dataset(args: argparse.Namespace) -> tuple[torch.utils.data.DataLoader, torch.utils.data.DataLoader]:
    """Loaders for training and for testing; the last batches are smaller, which needs no new graph."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train = torch.utils.data.TensorDataset(images[:1400], labels[:1400])
    test = torch.utils.data.TensorDataset(images[1400:], labels[1400:])
    return (
        torch.utils.data.DataLoader(train, batch_size=args.batch_size),
        torch.utils.data.DataLoader(test, batch_size=args.test_batch_size),
    )


def wrap(args: argparse.Namespace, model: nn.Module) -> nn.Module:
    """The model as it is trained, with dumps of its graphs where they are asked for."""
    if args.pytorch_only:
        return model
    if not args.save_onnx:
        return ORTModule(model)
    os.environ["ORTMODULE_SAVE_ONNX_PATH"] = args.save_onnx
    debug = DebugOptions(log_level=LogLevel.INFO, save_onnx=True, onnx_prefix="digits", save_path=args.save_onnx)
    return ORTModule(model, debug)


def subscribe(args: argparse.Namespace, model: nn.Module) -> None:
    """Write statistics of all activations and their gradients, to compare two runs."""
    # from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber
    from onnxtrain.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    folder = os.path.join(args.statistics, "pt" if args.pytorch_only else "ort")
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir=folder, override_output_dir=True)])


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loader: torch.utils.data.DataLoader,
    skip: int = 0,
) -> list[float]:
    """One pass over the training data; the loss of each step."""
    model.train()
    losses = []
    for step, (data, target) in enumerate(loader):
        if not skip <= step < args.steps:
            continue
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.amp):
            loss, _ = model(data, labels=target)
        scaler.scale(loss / args.gradient_accumulation_steps).backward()
        if (step + 1) % args.gradient_accumulation_steps == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def test(model: nn.Module, loader: torch.utils.data.DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy on the test data."""
    model.eval()
    loss, right, total = 0.0, 0, 0
    for data, target in loader:
        loss += model(data, labels=target)[0].item() * len(target)
        right += (model.predict(data) == target).sum().item()
        total += len(target)
    return loss / total, right / total


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """A checkpoint: the names in it are the plain model's."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(states, path)


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Continue from a checkpoint, whoever wrote it."""
    states = torch.load(path, weights_only=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    scaler.load_state_dict(states["scaler"])


def build(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    """Model, optimizer and gradient scaler at the beginning of a run."""
    torch.manual_seed(args.seed)
    model = NeuralNet(input_size=64, hidden_size=96, num_classes=10).to(args.device)
    if args.statistics:
        subscribe(args, model)
    model = wrap(args, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return model, optimizer, torch.amp.GradScaler(args.device, enabled=args.amp and args.device == "cuda")


def run(args: argparse.Namespace, checkpoint: str) -> dict[str, list[float]]:
    """Train, save half way, continue in a new model from the checkpoint, test."""
    train_loader, test_loader = get_dataset(args)
    start = time.time()
    half = argparse.Namespace(**{**vars(args), "steps": args.steps // 2})
    states = build(args)
    losses = train(half, *states, train_loader)
    save(checkpoint, *states)

    states = build(args)
    load(checkpoint, *states)
    losses += train(args, *states, train_loader, skip=half.steps)
    loss, accuracy = test(states[0], test_loader)
    name = "PyTorch" if args.pytorch_only else "ORTModule"
    print(f"{name:9}  test loss {loss:.4f}, accuracy {accuracy:.1%}, {time.time() - start:.1f} s")
    return {"losses": losses, "test": [loss, accuracy]}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="batches; a multiple of four")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test-batch-size", type=int, default=64)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="automatic mixed precision")
    parser.add_argument("--pytorch-only", action="store_true", help="train without ORTModule")
    parser.add_argument("--save-onnx", metavar="FOLDER", help="write the graph of every stage")
    parser.add_argument("--statistics", metavar="FOLDER", help="write statistics of activations")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        ours = run(args, os.path.join(folder, "checkpoint.pt"))
        if args.pytorch_only:
            return 0
        args.pytorch_only = True
        eager = run(args, os.path.join(folder, "eager.pt"))
    print("step         eager     ORTModule")
    for step, row in enumerate(zip(eager["losses"], ours["losses"], strict=True)):
        print(f"{step + 1:4}", *(f"{loss:13.6f}" for loss in row))
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], eager["losses"], strict=True))
    tolerance = 2e-2 if args.amp else 1e-4  # bfloat16 has three digits
    print(f"largest relative difference of a loss: {worst:.1e}", "SAME" if worst < tolerance else "DIFFERENT")
    return int(worst >= tolerance)


if __name__ == "__main__":
    sys.exit(main())
