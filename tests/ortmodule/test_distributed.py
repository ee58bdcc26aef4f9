"""Two processes that train an ORTModule together have the losses and the state of one that trains alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import distributed_training as training
import pytest
import torch
from distributed_training import Trained, alone, ddp, fsdp, fsdp_blocks, train
from ranks import Ranks

BACKENDS = ("torch", "onnxruntime")
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


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards(ranks: Ranks, backend: str, reshard: dict[str, bool]) -> None:
    near(ranks(train, "Net", fsdp, backend, **reshard), eager())


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_each_block(ranks: Ranks, backend: str) -> None:
    near(ranks(train, "Net", fsdp_blocks, inner=backend, reshard_after_forward=True), eager())


@pytest.mark.parametrize("how", [ddp, fsdp])
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


ROUND = "the other way round: "
REFUSED = {
    "DataParallel inside": ("cannot wrap DataParallel", "use DistributedDataParallel around ORTModule"),
    "DistributedDataParallel inside": ("whose forward communicates", f"{ROUND}DistributedDataParallel(ORTModule("),
    "fully_shard inside": ("FSDPNet is sharded inside of the ORTModule", f"{ROUND}fully_shard(ORTModule(module))"),
    "sharded blocks inside": ("submodule blocks.0 is sharded inside", "fully_shard(ORTModule(block))"),
    "blocks sharded after wrapping": ("submodule blocks.0 is sharded inside", "fully_shard(ORTModule(block))"),
    "forward instead of the module": ("parameter scale is a DTensor", "model(...), not model.forward(...)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_cure(ranks: Ranks, case: str) -> None:
    problem, cure = REFUSED[case]
    for text in ranks(training.refusal, case):
        first, _, second = text.partition("\n  cure: ")
        assert problem in first and cure in second
