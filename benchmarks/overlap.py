"""How much of slow communication DistributedDataParallel hides: ``python -m benchmarks.overlap WORKLOAD``.

Two processes train a workload over gloo, with a communication hook that takes a stated time for each bucket, one bucket
after the other, as a network does. In eager PyTorch and in ORTModule, whole and in parts, a step with the waiting is
timed in turn with one without it. What the difference is short of all the buckets' time was hidden.
"""

import argparse  # without annotations from __future__: torch reads those of a communication hook
import copy
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

from benchmarks.measure import wrap
from benchmarks.workloads import WORKLOADS, Size, batches

VARIANTS = ("eager", "torch", "torch-whole")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        workload: name of what is trained.
        size: the shape of it.
        steps: timed steps of each kind.
        seconds: that a bucket takes.
        bucket_mb: size of a bucket.
    """

    workload: str
    size: Size
    steps: int
    seconds: float
    bucket_mb: float


class Network:
    """Reduces one bucket after the other, each no faster than a stated time."""

    def __init__(self) -> None:
        self.seconds, self.buckets, self._worker = 0.0, 0, ThreadPoolExecutor(1)

    def average(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a bucket: a communication hook."""
        found: Any = torch.futures.Future()
        self.buckets += 1
        self._worker.submit(self._reduce, bucket.buffer(), self.seconds, found)
        return found

    def _reduce(self, gradients: torch.Tensor, seconds: float, found: Any) -> None:
        time.sleep(seconds)
        dist.all_reduce(gradients)
        found.set_result(gradients.div_(dist.get_world_size()))


class Trained:
    """A variant among replicas."""

    def __init__(self, name: str, model: torch.nn.Module, bucket_mb: float) -> None:
        self.name, self.network = name, Network()
        self.model = DistributedDataParallel(wrap(name, copy.deepcopy(model)), bucket_cap_mb=bucket_mb)
        self.model.register_comm_hook(None, self.network.average)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.losses: list[float] = []

    def step(self, batch: dict[str, torch.Tensor], seconds: float) -> float:
        """One training step; how long it took."""
        self.network.seconds, self.network.buckets = seconds, 0
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        taken = time.perf_counter() - start
        self.losses.append(loss.item())
        return taken

    def row(self, seconds: float) -> str:
        """Medians of step times, and the share of the communication that was hidden."""
        alone, waiting = (statistics.median(self.seconds[slow]) for slow in (False, True))
        extra = statistics.median(b - a for a, b in zip(self.seconds[False], self.seconds[True], strict=True))
        total = self.network.buckets * seconds
        numbers = f"{alone * 1e3:9.1f} {waiting * 1e3:9.1f} {self.network.buckets:8d} {total * 1e3:9.1f}"
        return f"{self.name:<12} {numbers} {1 - extra / total:8.0%}"


def _rank(rank: int, file: str, setting: Setting) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    workload = WORKLOADS[setting.workload]
    model = workload.build(setting.size)
    variants = [Trained(name, model, setting.bucket_mb) for name in VARIANTS]
    data = batches(workload, setting.size, setting.steps + 3, rank, grouped=False)
    for batch in data[:3]:
        for variant in variants:
            variant.step(batch, 0.0)
    for batch in data[3:]:
        for variant in variants:
            for slow in (False, True):
                variant.seconds[slow].append(variant.step(batch, setting.seconds if slow else 0.0))
    if rank == 0:
        print(f"{'variant':<12} {'step ms':>9} {'with it':>9} {'buckets':>8} {'their ms':>9} {'hidden':>8}")
        for variant in variants:
            print(variant.row(setting.seconds))
        spread = max(abs(a - b) for v in variants for a, b in zip(v.losses, variants[0].losses, strict=True))
        print(f"largest difference of losses: {spread:.1e}")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("workload", nargs="?", default="gpt2_lm", choices=tuple(WORKLOADS), metavar="WORKLOAD")
    for name, value in (("layers", 12), ("hidden", 256), ("batch", 4), ("length", 128), ("vocabulary", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each kind")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="that a bucket takes; default 20")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="size of a bucket; default 4")
    given = parser.parse_args(arguments)
    size = Size(given.layers, given.hidden, given.batch, given.length, vocabulary=given.vocabulary)
    setting = Setting(given.workload, size, given.steps, given.milliseconds / 1e3, given.bucket_mb)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/meet", setting), nprocs=2)


if __name__ == "__main__":
    main()
