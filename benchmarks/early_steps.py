"""What an optimizer that steps within the backward pass gains: ``python -m benchmarks.early_steps WORKLOAD``.

In eager PyTorch and in ORTModule, with the backward pass in parts and whole, a model is trained by an optimizer in the
ordinary way and by one that steps within the backward pass, step by step in turn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers.utils import logging

from benchmarks.workloads import WORKLOADS, Size, batches
from onnxtrain import Options, ORTModule
from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.optim import step_in_backward

KINDS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "eager": lambda model: model,
    "torch": lambda model: ORTModule(model, options=Options(backend="torch", summary=False)),
    "torch-whole": lambda model: ORTModule(model, options=Options(backend="torch", summary=False, segments=1)),
}
WARMUP = 3


class Trained:
    """A model in training; the optimizer has its state from the first step on."""

    def __init__(self, kind: str, model: torch.nn.Module, apart: bool, fused: bool) -> None:
        self.inner = copy.deepcopy(model)
        self.model = KINDS[kind](self.inner)
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-4, fused=fused)
        self.stepper = step_in_backward(self.optimizer) if apart else None
        self.seconds: list[float] = []

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """One training step."""
        start = time.perf_counter()
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def row(kind: str, model: torch.nn.Module, data: list[dict[str, torch.Tensor]], fused: bool) -> str:
    """Peaks and medians of the steps of both, and whether they end with the same parameters."""
    both = [Trained(kind, model, apart, fused) for apart in (False, True)]
    for index, batch in enumerate(data):
        for trained in both if index % 2 else both[::-1]:
            torch.manual_seed(index)
            trained.step(batch)
    same = all(map(torch.equal, *(list(trained.inner.parameters()) for trained in both)))
    timed = [trained.seconds[WARMUP:] for trained in both]
    ratio = statistics.median(b / a for a, b in zip(*timed, strict=True))
    times = "".join(f"{statistics.median(seconds) * 1e3:10.1f}" for seconds in timed)
    peaks = "".join(f"{peak_of(lambda t=trained: t.step(data[0])) / 2**20:10.1f}" for trained in both)
    return f"{kind:<12} {'fused' if fused else 'plain':<6}{times} {ratio:7.3f} {peaks} {'yes' if same else 'NO':>6}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_steps", description=__doc__)
    parser.add_argument("workload", nargs="?", default="bert_classify", choices=tuple(WORKLOADS), metavar="WORKLOAD")
    for name, value in (("layers", 4), ("hidden", 256), ("batch", 8), ("length", 128), ("vocabulary", 30522)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each")
    given = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = Size(given.layers, given.hidden, given.batch, given.length, vocabulary=given.vocabulary)
    workload = WORKLOADS[given.workload]
    model = workload.build(size)
    data = batches(workload, size, WARMUP + given.steps, 0, grouped=False)
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    print(f"{weights:.1f} MiB of parameters; peaks beside parameters and the optimizer's state")
    print(f"{'':<12} {'AdamW':<6}{'step ms':>10}{'in it':>10} {'ratio':>7} {'peak MiB':>10}{'in it':>10} {'same':>6}")
    for kind in KINDS:
        for fused in (False, True):
            print(row(kind, model, data, fused), flush=True)


if __name__ == "__main__":
    main()
