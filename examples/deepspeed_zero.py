"""Train with DeepSpeed's ZeRO in several processes: the losses of its engine around eager PyTorch and around ORTModule.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 3
    deepspeed --num_accelerators 2 examples/deepspeed_zero.py --stage 2

A small GPT-2 with random weights learns to count. In stage 3 the parameters of a layer are gathered while the graph
reads them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from onnxtrain import ORTModule
from onnxtrain.optim import FusedAdam

TOLERANCE = 1e-4  # relative, of one loss
WORDS, LENGTH = 64, 24


def build_model(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 with two layers, without dropout."""
    torch.manual_seed(seed)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**size, **off, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def batch(step: int, rank: int, rows: int) -> torch.Tensor:
    """Ids [rows, LENGTH]: each row counts upwards from somewhere."""
    first = torch.randint(WORDS, (rows, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (first + torch.arange(LENGTH)) % WORDS


def train(model: torch.nn.Module, stage: int, steps: int, rows: int) -> list[float]:
    """This rank's losses."""
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(steps):
        ids = batch(step, engine.global_rank, rows).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="of a batch, at each rank")
    parser.add_argument("--local_rank", type=int, help="set by DeepSpeed's launcher")
    options = parser.parse_args()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    kinds: dict[str, Callable[[], torch.nn.Module]] = {
        "eager": build_model,
        "ORTModule": lambda: ORTModule(build_model()),
    }
    losses = {name: train(make(), options.stage, options.steps, options.rows) for name, make in kinds.items()}
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["ORTModule"], losses["eager"], strict=True))
    if torch.distributed.get_rank() == 0:
        print("step         eager     ORTModule")
        for step, row in enumerate(zip(*losses.values(), strict=True)):
            print(f"{step + 1:4}", *(f"{loss:13.6f}" for loss in row))
        print(f"largest relative difference of a loss: {worst:.1e}", "SAME" if worst < TOLERANCE else "DIFFERENT")
    torch.distributed.destroy_process_group()  # whose threads would else outlive the interpreter
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
