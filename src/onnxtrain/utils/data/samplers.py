"""Samplers by complexity: samples that cost about the same go to the ranks of one step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

Batch = list[int]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Sorts samples by complexity and gives each run of neighbours, one sample each, to the ranks of one step.

    Args:
        dataset: has a length, and samples by index.
        complexity_fn: the cost of a sample, in any unit; called once for each sample, when first needed.
        world_size: number of ranks; None asks ``torch.distributed``.
        rank: this rank; None asks ``torch.distributed``.
        shuffle: the steps come in a random order, which depends on ``seed`` and the epoch alone; without it, the
            simplest come first.
        group_size: sort within groups of so many consecutive samples (rounded up to a multiple of ``world_size``)
            instead of the whole dataset.
        seed: the same on all ranks.
        drop_last: leave out samples so that all ranks have equally many; else some samples come twice.
        random_level: how far a sample may be from its place, from 0 to 1: random numbers up to this part of the range
            of complexities are added before sorting, others in each epoch; needs ``shuffle``.

    Raises:
        ValueError: ``random_level`` is not within [0, 1], ``rank`` not within the world, or ``group_size`` below 1.
        RuntimeError: the world is not given, and ``torch.distributed`` is not initialized.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.world_size = _distributed().get_world_size() if world_size is None else world_size
        self.rank = _distributed().get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, not {self.rank}")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level must be from 0 to 1, not {random_level}")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size must be positive, not {group_size}")
        self.dataset, self.complexity_fn, self.shuffle, self.group_size = dataset, complexity_fn, shuffle, group_size
        self.seed, self.drop_last, self.random_level, self.epoch = seed, drop_last, random_level, 0

    @functools.cached_property
    def complexities(self) -> list[float]:
        """The complexity of each sample."""
        return [self.complexity_fn(self.dataset[index]) for index in range(len(self.dataset))]

    def steps(self) -> list[Batch]:
        """The samples of each step of this epoch, one for each rank; the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        groups = self._filled(self._sorted(generator))
        order = list(itertools.chain.from_iterable(groups))[: len(self) * self.world_size]
        found = [order[start : start + self.world_size] for start in range(0, len(order), self.world_size)]
        if not self.shuffle:
            return found
        return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]

    def _sorted(self, generator: torch.Generator) -> list[Batch]:
        """The groups, each in the order of complexity; all but the last fill whole steps."""
        costs, size = self._costs(generator), len(self.complexities)
        if self.group_size is not None:
            size = -(-self.group_size // self.world_size) * self.world_size
        samples = self._kept(generator)
        groups = (samples[start : start + size] for start in range(0, len(samples), max(1, size)))
        return [sorted(group, key=costs.__getitem__) for group in groups]

    def _costs(self, generator: torch.Generator) -> list[float]:
        costs = self.complexities
        if not self.shuffle or self.random_level == 0 or not costs:
            return costs
        span = self.random_level * (max(costs) - min(costs))
        noise = torch.rand(len(costs), generator=generator, dtype=torch.float64).tolist()
        return [cost + span * part for cost, part in zip(costs, noise, strict=True)]

    def _kept(self, generator: torch.Generator) -> Batch:
        """All samples; those that ``drop_last`` leaves out are others in each epoch, not always the most complex."""
        count = len(self.complexities)
        if not self.drop_last or not self.shuffle:
            return list(range(count))
        return sorted(torch.randperm(count, generator=generator)[: len(self) * self.world_size].tolist())

    def _filled(self, groups: list[Batch]) -> list[Batch]:
        """The last group filled up with its own last samples, whose complexity is near."""
        missing = 0 if not groups or self.drop_last else -len(groups[-1]) % self.world_size
        if missing:
            groups[-1] += list(itertools.islice(itertools.cycle(groups[-1][-missing:]), missing))
        return groups

    def __iter__(self) -> Iterator[int]:
        return iter([step[self.rank] for step in self.steps()])

    def __len__(self) -> int:
        count = len(self.dataset)
        return count // self.world_size if self.drop_last else -(-count // self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, on all ranks alike: each has its own order."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[Batch]):
    """Batches of a load balancing sampler, equally many on all ranks.

    Args:
        sampler: gives the samples; its ``drop_last`` must be False.
        batch_fn: groups the samples of one rank, in order, into batches; the same on all ranks.
        drop_last: cut all ranks to the fewest batches that any has; else the others repeat batches from the start.

    Raises:
        ValueError: ``sampler`` is of another type, or leaves out samples.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[Batch], Sequence[Batch]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(f"sampler must be a LoadBalancingDistributedSampler, not a {type(sampler).__name__}")
        if sampler.drop_last:
            raise ValueError("the sampler must have drop_last=False: this sampler drops whole batches instead")
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._made: tuple[int, list[Batch]] | None = None

    def _batches(self) -> list[Batch]:
        """This rank's batches of the epoch; every rank groups all ranks' samples, to know how many there are."""
        if self._made is None or self._made[0] != self.sampler.epoch:
            steps = self.sampler.steps()
            every = [list(self.batch_fn([s[rank] for s in steps])) for rank in range(self.sampler.world_size)]
            counts = [len(batches) for batches in every]
            if min(counts) == 0 < max(counts) and not self.drop_last:
                raise ValueError(f"batch_fn made no batch for rank {counts.index(0)}, which has none to repeat")
            wanted = min(counts) if self.drop_last else max(counts)
            mine = itertools.cycle(every[self.sampler.rank])
            self._made = self.sampler.epoch, list(itertools.islice(mine, wanted))
        return self._made[1]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, on all ranks alike."""
        self.sampler.set_epoch(epoch)


def _distributed() -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: initialize it, or pass world_size and rank")
    return torch.distributed
