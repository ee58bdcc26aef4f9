"""Load balancing samplers: properties that hold for every size of world and dataset."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxtrain.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

COSTS = st.lists(st.integers(0, 50), max_size=40)
WORLD = st.integers(1, 5)
OPTIONS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "group_size": st.none() | st.integers(1, 20),
        "drop_last": st.booleans(),
        "random_level": st.sampled_from([0, 0.3, 1]),
        "seed": st.integers(0, 3),
    }
)


def samplers(costs, world, **options):
    made = [LoadBalancingDistributedSampler(costs, lambda c: c, world, rank, **options) for rank in range(world)]
    for sampler in made:
        sampler.set_epoch(options.get("epoch", 0))
    return made


@settings(max_examples=200, deadline=None)
@given(COSTS, WORLD, OPTIONS)
def test_every_sample_once_and_all_ranks_equal(costs, world, options):
    ranks = [list(s) for s in samplers(costs, world, **options)]
    assert {len(r) for r in ranks} == {len(s) for s in samplers(costs, world, **options)}
    times = collections.Counter(itertools.chain(*ranks))
    extra = sum(times.values()) - len(costs)
    if options["drop_last"]:
        assert set(times.values()) <= {1} and -world < extra <= 0
    else:
        assert set(times) == set(range(len(costs))) and 0 <= extra < world


@settings(max_examples=200, deadline=None)
@given(COSTS, WORLD, OPTIONS)
def test_the_samples_of_a_step_are_neighbours(costs, world, options):
    """No sample of another step has a complexity strictly between those of one step, within its group."""
    options |= {"random_level": 0}
    steps = list(zip(*samplers(costs, world, **options), strict=True))
    if options["group_size"] is None:
        for step, other in itertools.permutations(steps, 2):
            low, high = min(costs[i] for i in step), max(costs[i] for i in step)
            repeated = set(step) & set(other)
            assert not any(low < costs[i] < high for i in other if i not in repeated)
    if not options["drop_last"] or not options["shuffle"]:
        size = len(costs) if options["group_size"] is None else -(-options["group_size"] // world) * world
        assert all(len({i // size for i in step}) == 1 for step in steps)


@settings(max_examples=50, deadline=None)
@given(COSTS, WORLD, OPTIONS)
def test_seed_and_epoch_decide(costs, world, options):
    first, second = (samplers(costs, world, **options)[0] for _ in range(2))
    for epoch in (0, 1, 0):
        first.set_epoch(epoch), second.set_epoch(epoch)
        assert list(first) == list(second) == list(second)


def test_epochs_and_seeds_differ():
    costs = list(range(40))
    orders = []
    for epoch, seed in ((0, 0), (1, 0), (0, 5)):
        sampler = LoadBalancingDistributedSampler(costs, float, 2, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 3
    still = LoadBalancingDistributedSampler(costs[::-1], float, 2, 0, shuffle=False)
    before = list(still)
    still.set_epoch(3)
    assert list(still) == before == list(range(39, 0, -2)), "without shuffle the simplest come first"


def test_random_level_moves_samples_and_drop_last_leaves_out_others():
    costs = list(range(41))

    def steps(epoch, **options):
        made = samplers(costs, 2, **options)
        for sampler in made:
            sampler.set_epoch(epoch)
        return {frozenset(step) for step in zip(*made, strict=True)}

    assert steps(0) == steps(1) == {frozenset((i, i + 1)) for i in range(0, 40, 2)} | {frozenset((40,))}
    assert steps(0, random_level=1) != steps(1, random_level=1)
    assert frozenset().union(*steps(0, drop_last=True)) != frozenset().union(*steps(1, drop_last=True))


def test_complexity_is_asked_once_for_each_sample():
    asked = []
    sampler = LoadBalancingDistributedSampler([3, 1, 2], lambda c: asked.append(c) or c, 1, 0)
    assert not asked and sorted(sampler) == sorted(sampler) == [0, 1, 2] and asked == [3, 1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"random_level": -0.1}, "random_level"),
        ({"random_level": 1.1}, "random_level"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_wrong_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        LoadBalancingDistributedSampler([1], float, **{"world_size": 2, "rank": 0, **options})


def test_the_world_comes_from_torch_distributed(tmp_path):
    with pytest.raises(RuntimeError, match="not initialized"):
        LoadBalancingDistributedSampler([1], float)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        assert list(LoadBalancingDistributedSampler([1], float)) == [0]
    finally:
        torch.distributed.destroy_process_group()


def by_cost(costs, limit):
    """Batches whose complexities sum to at most a limit."""

    def group(indices):
        batches = [[]]
        for index in indices:
            if batches[-1] and sum(costs[i] for i in batches[-1]) + costs[index] > limit:
                batches.append([])
            batches[-1].append(index)
        return [b for b in batches if b]

    return group


@settings(max_examples=100, deadline=None)
@given(COSTS, WORLD, OPTIONS, st.integers(10, 100), st.booleans())
def test_batches_are_as_many_on_all_ranks(costs, world, options, limit, drop_last):
    options["drop_last"] = False
    inner, group = samplers(costs, world, **options), by_cost(costs, limit)
    made = [LoadBalancingDistributedBatchSampler(s, group, drop_last) for s in inner]
    for epoch in (0, 1):
        for sampler in made:
            sampler.set_epoch(epoch)
        mine = [group(list(s)) for s in inner]
        wanted = (min if drop_last else max)(len(batches) for batches in mine)
        for sampler, batches in zip(made, mine, strict=True):
            assert len(sampler) == len(list(sampler)) == wanted
            assert list(sampler) == list(itertools.islice(itertools.cycle(batches), wanted))


def test_what_a_batch_sampler_refuses():
    with pytest.raises(ValueError, match="LoadBalancingDistributedSampler, not a list"):
        LoadBalancingDistributedBatchSampler([], list)
    with pytest.raises(ValueError, match="drop_last=False"):
        LoadBalancingDistributedBatchSampler(samplers([1], 1, drop_last=True)[0], list)
    uneven = LoadBalancingDistributedBatchSampler(samplers([1, 2], 2)[0], lambda ids: [ids] if 1 in ids else [])
    with pytest.raises(ValueError, match="no batch for rank 0"):
        list(uneven)


def test_data_loader_takes_both():
    costs = torch.arange(10.0)
    sampler = samplers(costs, 2)[1]
    alone = torch.utils.data.DataLoader(costs, batch_size=2, sampler=sampler)
    assert torch.cat(list(alone)).tolist() == [float(i) for i in sampler]
    batches = LoadBalancingDistributedBatchSampler(sampler, lambda ids: [ids[:3], ids[3:]])
    loader = torch.utils.data.DataLoader(costs, batch_sampler=batches)
    assert [b.tolist() for b in loader] == [[float(i) for i in batch] for batch in batches]
