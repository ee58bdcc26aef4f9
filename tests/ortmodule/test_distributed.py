"""Two processes that train an ORTModule together have the losses and the state of one that trains alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed_training as training
import pytest
import torch
from distributed_training import Trained, alone, ddp, fsdp, fsdp_blocks, train
from ranks import Ranks
from torch.distributed.fsdp import MixedPrecisionPolicy

BACKENDS = ("torch", "onnxruntime")
WITHIN = [training.fsdp_within, training.fsdp_before]  # how blocks inside of one graph are in shards
RESHARD = ({"reshard_after_forward": False}, {"reshard_after_forward": True})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@functools.cache
def eager(model: str = "Net", **settings: Any) -> Trained:
    """One process, whole batches."""
    return train(model, alone, **settings)


def near(found: list[Trained], expected: Trained, tolerance: float = 1e-5) -> None:
    """Every rank has the losses and the state."""
    for rank in found:
        torch.testing.assert_close(rank, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas(ranks: Ranks, backend: str) -> None:
    near(ranks(train, "Net", ddp, backend), eager())


@pytest.mark.parametrize("setting", ["static_graph", "gradient_as_bucket_view", "find_unused_parameters"])
def test_settings_of_replicas(ranks: Ranks, setting: str) -> None:
    near(ranks(train, "Net", ddp, "torch", **{setting: True}), eager())


@pytest.mark.parametrize("setting", ["static_graph", "gradient_as_bucket_view", "find_unused_parameters"])
@pytest.mark.parametrize("model", ["Net", "Tied", "Deep"])
def test_replicas_in_parts(ranks: Ranks, model: str, setting: str) -> None:
    near(ranks(train, model, ddp, "torch", options={"segments": 4}, **{setting: True}), eager(model))


@pytest.mark.parametrize(("hook", "close"), [("fp16_compress_hook", 1e-4), ("powerSGD_hook", 2e-2)])
def test_replicas_whose_gradients_are_compressed(ranks: Ranks, hook: str, close: float) -> None:
    """By low ranks each gradient is approximated from another start, since they come in another order."""
    found, wanted = (ranks(training.replicated, backend, hook) for backend in ("torch", None))
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_replicas_of_which_one_has_less_to_do(ranks: Ranks) -> None:
    found, wanted = (ranks(training.uneven, backend) for backend in ("torch", None))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(found[0][0]) < len(found[1][0])


def test_parts_are_computed_while_gradients_are_averaged(ranks: Ranks) -> None:
    for order in ranks(training.order_of_work, 6):
        parts = [i for i, what in enumerate(order) if what == "part"]
        buckets = [i for i, what in enumerate(order) if what == "bucket"]
        assert len(parts) == 6 and len(buckets) >= 6
        between = [sum(a < i < b for i in buckets) for a, b in itertools.pairwise(parts)]
        assert all(between), "after each part something can be averaged"
    assert all(order[1:].count("part") == 0 for order in ranks(training.order_of_work, 1))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("reshard", RESHARD)
def test_shards_in_parts(ranks: Ranks, reshard: dict[str, bool], parts: int) -> None:
    near(ranks(train, "Deep", fsdp, "torch", parts=parts, options={"segments": 4}, **reshard), eager("Deep"))


def test_shards_are_updated_in_the_backward_pass(ranks: Ranks) -> None:
    near(ranks(train, "Deep", fsdp, "torch", apart=True, options={"segments": 4}), eager("Deep"))
    near(ranks(train, "Net", fsdp, "torch", apart=True, alternate=True), eager(alternate=True))
    near(ranks(train, "Net", fsdp_blocks, inner="torch", apart=True), eager())


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards(ranks: Ranks, backend: str, reshard: dict[str, bool]) -> None:
    near(ranks(train, "Net", fsdp, backend, **reshard), eager())


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_each_block(ranks: Ranks, backend: str) -> None:
    near(ranks(train, "Net", fsdp_blocks, inner=backend, reshard_after_forward=True), eager())


@pytest.mark.parametrize("model", ["Net", "Deep", "Tied", "bert"])
@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("how", WITHIN)
def test_shards_within_one_graph(ranks: Ranks, how: Any, reshard: dict[str, bool], model: str) -> None:
    """Losses and state of eager PyTorch, and those of FSDP2 in eager PyTorch."""
    found, expected = (ranks(train, model, how, backend, **reshard) for backend in ("torch", None))
    near(found, expected[0], tolerance=1e-6)
    near(found, eager(model))


@pytest.mark.parametrize("how", WITHIN)
def test_accumulation_clipping_and_blocks_left_out_within_one_graph(ranks: Ranks, how: Any) -> None:
    near(ranks(train, "Net", how, "torch", parts=2), eager())
    near(ranks(train, "Net", how, "torch", clip=0.1), eager(clip=0.1))
    near(ranks(train, "Net", how, "torch", alternate=True), eager(alternate=True))


def test_shards_without_a_root(ranks: Ranks) -> None:
    near(ranks(train, "Deep", training.fsdp_blocks_alone, "torch"), eager("Deep"))


def test_one_block_is_gathered_at_a_time(ranks: Ranks) -> None:
    """As in FSDP2: this one, and the one that comes next in the backward pass."""
    for within, around in ranks(training.most_gathered):
        assert 0 < within <= around
    assert ranks(training.graphs_of_shards) == [[1, 1], [1, 1]]


@pytest.mark.parametrize("how", [fsdp, *WITHIN])
def test_memory_of_a_sharded_module(ranks: Ranks, how: Any) -> None:
    for told, whole, losses in ranks(training.told_of_shards, how):
        assert told == whole and losses[0] == losses[1]


@pytest.mark.parametrize("how", [ddp, fsdp, *WITHIN])
def test_accumulated_gradients(ranks: Ranks, how: Any) -> None:
    near(ranks(train, "Net", how, "torch", parts=2), eager())


def test_gradients_that_wait(ranks: Ranks) -> None:
    pairs = list(zip(*ranks(training.kept_back, ddp), strict=True))
    assert pairs and all(not torch.equal(a, b) for a, b in pairs), "each rank has its own"
    assert all(gradient is None for gradient in ranks(training.kept_back, fsdp)[0]), "no shard has one yet"


@pytest.mark.parametrize(("how", "settings"), [(ddp, {"find_unused_parameters": True}), (fsdp, {})])
def test_a_block_that_some_steps_leave_out(ranks: Ranks, how: Any, settings: dict[str, bool]) -> None:
    near(ranks(train, "Net", how, "torch", alternate=True, **settings), eager(alternate=True))


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_buffers(ranks: Ranks, how: Any) -> None:
    """Statistics are of a rank's own rows, in eager PyTorch too; DistributedDataParallel then takes those of rank 0."""
    found, expected = ranks(train, "Normalized", how, "torch"), ranks(train, "Normalized", how)
    for ours, theirs in zip(found, expected, strict=True):
        near([ours], theirs)


@pytest.mark.parametrize(("how", "settings"), [(ddp, {}), (fsdp, RESHARD[1])])
def test_tied_weights(ranks: Ranks, how: Any, settings: dict[str, bool]) -> None:
    near(ranks(train, "Tied", how, "torch", **settings), eager("Tied"))


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_clipped_gradients(ranks: Ranks, how: Any) -> None:
    near(ranks(train, "Net", how, "torch", clip=0.1), eager(clip=0.1))


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_transformers(ranks: Ranks, how: Any) -> None:
    near(ranks(train, "bert", how, "torch"), eager("bert"))


def test_mixed_precision(ranks: Ranks) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for how in (fsdp, *WITHIN):
        found, expected = (ranks(train, "Net", how, b, mp_policy=policy) for b in ("torch", None))
        near(found, expected[0], tolerance=1e-2)
        near(found, eager(), tolerance=5e-2)
        assert found[0][0] != eager()[0], "nothing was computed in bfloat16"


@pytest.mark.parametrize("how", [ddp, fsdp, *WITHIN])
def test_casts_of_autocast_are_not_kept_where_parameters_are_gathered(ranks: Ranks, how: Any) -> None:
    kept, made = (ranks(train, "Net", how, "torch", autocast=True, options={"cache_casts": c}) for c in (True, False))
    near(kept, made[0], tolerance=0.0)
    near(made, eager(autocast=True), tolerance=1e-2)


@pytest.mark.parametrize("how", [ddp, fsdp, *WITHIN])
def test_checkpoint_is_the_plain_module_s(ranks: Ranks, how: Any, tmp_path: Path) -> None:
    """Each goes on where the other stopped: parameters, buffers and the optimizer's state."""
    begin, rest, losses = range(2), range(2, training.STEPS), eager()[0]
    ranks(train, "Net", how, "torch", steps=begin, save=tmp_path / "ours")
    near([train("Net", alone, steps=rest, load=tmp_path / "ours")], (losses[2:], eager()[1]))
    train("Net", alone, steps=begin, save=tmp_path / "plain")
    near(ranks(train, "Net", how, "torch", steps=rest, load=tmp_path / "plain"), (losses[2:], eager()[1]))


@pytest.mark.parametrize("how", [ddp, fsdp])
def test_only_rank_0_speaks(ranks: Ranks, how: Any) -> None:
    spoken, silent = ranks(training.messages, how)
    assert any("Net runs as one graph" in text for text in spoken)
    assert any("captures Net: it is the first call" in text for text in spoken)
    assert silent == []


def test_replicas_can_be_verified(ranks: Ranks) -> None:
    assert all(kinds == {"loss", "gradient"} for kinds in ranks(training.verified, ddp))


ROUND = "the other way round: "
REFUSED = {
    "DataParallel inside": ("cannot wrap DataParallel", "use DistributedDataParallel around ORTModule"),
    "DistributedDataParallel inside": ("whose forward communicates", f"{ROUND}DistributedDataParallel(ORTModule("),
    "blocks sharded as one": ("several modules inside of the ORTModule are sharded as one", "shard each on its own"),
    "sharded blocks on onnxruntime": ("the onnxruntime backend gathers no parameters", "use the torch backend"),
    "forward instead of the module": ("parameter scale is a DTensor", "model(...), not model.forward(...)"),
    "forward after a step": ("parameter scale is a DTensor", "model(...), not model.forward(...)"),
    "FSDP1 inside": ("is sharded by FullyShardedDataParallel inside of the ORTModule", "use FSDP2"),
    "FSDP1, views": ("has replaced the parameters of Net", "use FSDP2"),
    "FSDP1, flat": ("has replaced the parameters of Net", "use FSDP2"),
    "verify of a sharded ORTModule": ("a step of Net cannot be verified", "before it is sharded: onnxtrain.verify("),
    "verify of a sharded module": ("a step of FSDPNet cannot be verified", "before it is sharded: onnxtrain.verify("),
}


@pytest.mark.parametrize("case", training.REFUSED)
def test_refused_with_the_cure(ranks: Ranks, case: str) -> None:
    problem, cure = REFUSED[case]
    for rank, text in enumerate(ranks(training.refusal, case)):
        first, _, second = text.partition("\n  cure: ")
        assert problem in first and cure in second
        assert first.endswith(f"\n  rank: {rank} of 2")


def test_ranks_that_gather_in_different_orders_are_told(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process has ended"):
        ranks(training.in_other_orders, tmp_path / "report")
    told = (tmp_path / "report").read_text()
    assert "different orders in the forward pass: blocks." in told and "rank: " in told
