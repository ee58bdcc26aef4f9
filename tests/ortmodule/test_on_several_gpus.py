"""Two GPUs over NCCL: losses and the final state are those of each engine without ORTModule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed_training
import distributed_training as training
import pytest
import torch
from ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
_CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"), "nccl")
    yield started
    started.close()


@pytest.mark.parametrize("model", ["Deep", "bert"])
@pytest.mark.parametrize("how", [training.ddp, training.fsdp, training.fsdp_within])
def test_replicas_and_shards(ranks: Ranks, how: Callable[..., Any], model: str) -> None:
    found, wanted = (ranks(training.train, model, how, backend) for backend in ("torch", None))
    torch.testing.assert_close(found, wanted, **_CLOSE)


@pytest.mark.parametrize("hook", training.COMPRESSING)
def test_compressed_gradients(ranks: Ranks, hook: str) -> None:
    found, wanted = (ranks(training.replicated, backend, hook) for backend in ("torch", None))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(ranks: Ranks, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}}
    run = functools.partial(ranks, deepspeed_training.train, config=zero)
    torch.testing.assert_close(run("whole"), run("eager"), **_CLOSE)
