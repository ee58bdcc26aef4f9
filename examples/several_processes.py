"""Train in several processes with PyTorch's own engines: losses around eager PyTorch and around ORTModule.

    torchrun --nproc-per-node 2 examples/several_processes.py --engine ddp
    torchrun --nproc-per-node 2 examples/several_processes.py --engine fsdp2

A small Llama with random weights learns to count. DistributedDataParallel is around one ORTModule; for FSDP2 each layer
is sharded too, so that parameters are gathered layer by layer within one graph.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from onnxtrain import ORTModule

TOLERANCE = 1e-4  # relative, of one loss
WORDS, LENGTH = 64, 24


def build_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama with two layers."""
    torch.manual_seed(seed)
    size = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **size)).train()


def distributed(model: LlamaForCausalLM, engine: str, wrap: type[ORTModule] | None) -> torch.nn.Module:
    """The model in an engine: wrapped first, then distributed.

    Args:
        model: in eager PyTorch.
        engine: ``"ddp"`` or ``"fsdp2"``.
        wrap: ``ORTModule``; None trains in eager PyTorch.
    """
    whole = model if wrap is None else wrap(model)
    if engine == "ddp":
        return DistributedDataParallel(whole)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(whole)


def batch(step: int, rank: int, rows: int) -> torch.Tensor:
    """Ids [rows, LENGTH]: each row counts upwards from somewhere."""
    first = torch.randint(WORDS, (rows, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (first + torch.arange(LENGTH)) % WORDS


def train(wrap: type[ORTModule] | None, options: argparse.Namespace, device: torch.device) -> list[float]:
    """This rank's losses; the model is gone before the processes part, whose threads may wait for it else."""
    model = distributed(build_model().to(device), options.engine, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        ids = batch(step, dist.get_rank(), options.rows).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="of a batch, at each rank")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    losses = {}
    for name, wrap in {"eager": None, "ORTModule": ORTModule}.items():
        losses[name] = train(wrap, options, device)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["ORTModule"], losses["eager"], strict=True))
    if dist.get_rank() == 0:
        print("step         eager     ORTModule")
        for step, row in enumerate(zip(*losses.values(), strict=True)):
            print(f"{step + 1:4}", *(f"{loss:13.6f}" for loss in row))
        print(f"largest relative difference of a loss: {worst:.1e}", "SAME" if worst < TOLERANCE else "DIFFERENT")
    dist.destroy_process_group()
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
