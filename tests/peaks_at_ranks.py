"""What training takes at the first of many ranks, as torch allocates it; the others are not there.

``python peaks_at_ranks.py N`` prints JSON: for each strategy of ``onnxtrain.cluster`` and each batch the most bytes in
use within a step. Collectives are those of torch's fake process group: they allocate, wait and send nothing.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

from onnxtrain import ORTModule
from onnxtrain.execute.torch.allocations import left_and_peak_of

WORDS, BUCKET = 1000, 500_000
BATCHES = {"large": (4, 128), "small": (1, 8)}  # what a step computes is most of its memory, or gradients are
STEPS = 5  # the first one makes the optimizer's state, and DeepSpeed learns from two what it may fetch ahead


def model() -> nn.Module:
    """A language model in eager PyTorch."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 128, "n_layer": 3, "n_head": 2, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))


def batch(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Texts of one length."""
    ids = torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _fsdp2(by_layer: bool = False) -> Callable[[dict[str, torch.Tensor]], None]:
    from torch.distributed.fsdp import fully_shard

    wrapped = ORTModule(model())
    for layer in wrapped.transformer.h if by_layer else ():
        fully_shard(layer)
    sharded = fully_shard(wrapped)
    return _step(sharded, torch.optim.AdamW(sharded.parameters()))


def _ddp() -> Callable[[dict[str, torch.Tensor]], None]:
    replica = nn.parallel.DistributedDataParallel(ORTModule(model()))
    replica.register_comm_hook(None, _as_it_is)  # the fake group gives nothing back, at which DDP looks
    return _step(replica, torch.optim.AdamW(replica.parameters(), fused=True))


def _as_it_is(state, bucket):  # DDP takes no annotations that are texts
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, torch.Tensor]], None]:
    def step(given: dict[str, torch.Tensor]) -> None:
        module(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(stage: int) -> Callable[[], Callable[[dict[str, torch.Tensor]], None]]:
    def make() -> Callable[[dict[str, torch.Tensor]], None]:
        import deepspeed

        from onnxtrain.optim import FusedAdam

        made = ORTModule(model())
        optimizer = FusedAdam(made.parameters(), lr=1e-4)
        zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        zero |= {"stage3_param_persistence_threshold": 0}  # by default all of so small a model stays gathered
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
        engine = deepspeed.initialize(model=made, optimizer=optimizer, config=config)[0]

        def step(given: dict[str, torch.Tensor]) -> None:
            engine.backward(engine(**given).loss)
            engine.step()

        return step

    return make


def peaks() -> Iterator[tuple[str, str, int]]:
    """Strategy, batch and bytes."""
    by_layer = functools.partial(_fsdp2, by_layer=True)
    engines = {
        "ddp": _ddp,
        "fsdp2": _fsdp2,
        "fsdp2-layers": by_layer,
        **{f"zero{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    }
    for strategy, make in engines.items():
        for name, shape in BATCHES.items():
            yield strategy, name, _peak(make, batch(shape))


def _peak(make: Callable[[], Callable[[dict[str, torch.Tensor]], None]], given: dict[str, torch.Tensor]) -> int:
    """Bytes of the last step."""
    gc.collect()  # what others left, whose end would count here
    made: list[Callable[[dict[str, torch.Tensor]], None]] = []
    held, peak = left_and_peak_of(lambda: made.append(make()))
    for _ in range(STEPS):
        left, most = left_and_peak_of(lambda: (made[0](given), gc.collect()))
        peak, held = held + most, held + left
    return peak


def main(ranks: int) -> None:
    """Print the peaks."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT="1")
    os.environ.update(DS_ACCELERATOR="cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    print(json.dumps([*peaks()]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
