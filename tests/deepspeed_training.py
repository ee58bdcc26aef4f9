"""Training a small model with DeepSpeed's engine at each of two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from distributed_training import ending
from parity import captures
from ranks import device
from torch import nn

from onnxtrain import Options, ORTModule
from onnxtrain.optim import FP16_Optimizer, FusedAdam
from onnxtrain.utils.hooks import SubscriberManager, ZeROOffloadSubscriber, configure_ort_compatible_zero_stage3

WIDTH, WORDS = 16, 40
Trained = tuple[list[float], dict[str, torch.Tensor]]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Net(nn.Module):
    """A table of words that is the head's weight too, a parameter of the root's own, three blocks and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), labels.flatten())


def build(kind: str) -> nn.Module:
    """The model in eager PyTorch, as one ORTModule, or with each block as one."""
    torch.manual_seed(0)
    return wrapped(Net(), kind)


def wrapped(model: Net, kind: str) -> nn.Module:
    """A model as ``build`` has it."""
    if kind == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = ORTModule(block)
    return ORTModule(model) if kind == "whole" else model


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a model."""
    os.environ.update(DS_ACCELERATOR=device().type, LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"))
    import deepspeed

    deepspeed.init_distributed(dist.get_backend())
    optimizer = FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.1, adam_w_mode=2)
    whole = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True} | config
    return deepspeed.initialize(model=model, optimizer=optimizer, config=whole)[0]


def batch(step: int) -> list[torch.Tensor]:
    """This rank's batch of a step, of another length than that before."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ids = torch.randint(WORDS, (4, 6 + step % 3), generator=generator)
    return [ids.to(device()), ids.roll(1, 1).to(device())]


def train(
    kind: str,
    config: dict[str, Any],
    first: int = 0,
    last: int = 20,
    load: Path | None = None,
    save: Path | None = None,
    by_some_kernels: bool = False,
) -> Trained:
    """Losses of the steps from ``first`` to ``last``, and all parameters after them.

    Args:
        kind: see ``build``.
        config: DeepSpeed's.
        first: the first step.
        last: the step before which it ends.
        load: a folder of a checkpoint to begin with.
        save: where to write one at the end.
        by_some_kernels: whether ``FP16_Optimizer`` changes DeepSpeed's optimizer.
    """
    engine = engine_of(build(kind), config)
    if by_some_kernels:
        own = type(engine.optimizer).get_grad_norm_direct
        assert FP16_Optimizer(engine.optimizer) is engine.optimizer
        assert engine.optimizer.get_grad_norm_direct.__func__ is not own
    if load is not None:
        assert engine.load_checkpoint(str(load))[0] is not None
    return _train(engine, kind, config, range(first, last), save)


def ported(config: dict[str, Any], folder: Path) -> Trained:
    """Three steps of a script for the predecessor, which writes statistics of what passes through the layers."""
    configure_ort_compatible_zero_stage3(debug=True, stats_output_dir=str(folder / str(dist.get_rank())))
    model = build("whole")
    with SubscriberManager().subscribe(model, [ZeROOffloadSubscriber()]):
        engine = engine_of(model, config)
        return _train(engine, "whole", config, range(3), None)


def overflows(value: float) -> list[tuple[bool, ...]]:
    """What is found where one gradient has a value, by DeepSpeed's functions and by those of ``FP16_Optimizer``."""
    engine = engine_of(build("eager"), config={"zero_optimization": {"stage": 2}})
    optimizer, found = engine.optimizer, []
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    for p in parameters[:3]:
        p.grad = torch.ones(3)
    parameters[1].grad[2] = value
    for _ in range(2):
        optimizer.averaged_gradients = {0: [None, *(p.grad for p in parameters[:3])]}
        answers = optimizer.has_overflow_serial(parameters), optimizer.has_overflow_partitioned_grads_serial()
        assert all(a.shape == (1,) and a.dtype == torch.bool for a in answers)
        found.append((*map(bool, answers), optimizer.has_overflow()))
        FP16_Optimizer(optimizer)
    engine.destroy()
    return found


def from_shards(kind: str) -> Trained:
    """Losses of a model that is made in shards, and its parameters."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    engine_of(nn.Linear(1, 1), config).destroy()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build("eager")
    return _train(engine_of(wrapped(model, kind), config), kind, config, range(5), None)


def most_gathered(kind: str, config: dict[str, Any]) -> tuple[int, int, int]:
    """The most elements of parameters that are whole at once in two steps; how many all have, and one block."""
    engine = engine_of(build(kind), config)
    parameters = list(engine.module.parameters())
    coordinator, most = type(engine.optimizer.parameter_offload.get_param_coordinator()), [0]
    fetch = coordinator.fetch_sub_module

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        fetch(self, *args, **kwargs)
        most[0] = max(most[0], sum(p.ds_numel for p in parameters if p.ds_status.name == "AVAILABLE"))

    with mock.patch.object(coordinator, "fetch_sub_module", noted):
        for step in range(2):
            engine.backward(engine(*batch(step)))
            engine.step()
    block = sum(p.ds_numel for p in engine.module.blocks[0].parameters())
    engine.destroy()
    return most[0], sum(p.ds_numel for p in parameters), block


def _train(engine: Any, kind: str, config: dict[str, Any], steps: range, save: Path | None) -> Trained:
    losses = []
    for step in steps:
        for micro in range(config.get("gradient_accumulation_steps", 1)):
            loss = engine(*batch(step + 50 * micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    graphs = [captures(m) for m in engine.module.modules() if type(m).__name__ == "ORTModule"]
    assert graphs == {"eager": [], "whole": [1], "blocks": [1, 1, 1]}[kind], engine.module.explain()
    if save is not None:
        engine.save_checkpoint(str(save))
    return losses, whole_state(engine)


class Looking(nn.Module):
    """Layers that the batch chooses, a weight of the loss that it chooses at each rank, tied words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        x = self.first(x) if input_ids[0, 0] > WORDS // 2 else self.second(x)
        scores = self.head(self.memory(x)[0])
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss if labels[0, 0] > WORDS // 2 else 2 * loss}


def made(kind: str) -> nn.Module:
    """A model of the Transformers library, or one that looks into its batch."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
    size |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "looking":
        return Looking()
    if kind == "mixtral":  # whose experts DeepSpeed takes as one
        config = transformers.MixtralConfig(**size, num_key_value_heads=1, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))


def losses_of(kind: str, wraps: bool, options: Options | None = None, stage: int = 3) -> list[float]:
    """The losses of a model, in stage 3 one layer at a time; between two of them one of a forward pass alone."""
    model = made(kind)
    zero = {
        "stage": stage,
        "reduce_bucket_size": 700,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    }
    engine = engine_of(ORTModule(model, options=options) if wraps else model, {"zero_optimization": zero})
    losses = []
    for step in range(6):
        ids, labels = batch(step)
        ids[0, 0] = step * WORDS // 6
        loss = engine(input_ids=ids, labels=labels)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine(input_ids=ids, labels=labels)["loss"].item())
    if wraps:
        found = engine.module.__dict__["_ort_sessions"].entries
        assert sum(g.served for g in found) == len(losses) and engine.module.explain()
        operators = {n.op_type for g in found for n in g.session.bound.latest.plan.forward.graph}
        assert "PythonOp" not in operators  # DeepSpeed's F.linear
        known = stage == 3 and any(m._external_params for m in engine.module.modules())
        assert stage < 3 or known == (kind == "looking")  # else nobody looks at what is in shards
    assert stage < 3 or not any(p.ds_status.name == "AVAILABLE" for p in engine.module.parameters())
    engine.destroy()
    return losses


def padded(stage: int, wraps: bool) -> list[float]:
    """The losses of texts that are short at one rank, whose graph leaves out most rows, and long at the other."""
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config)
    zero = {"stage": stage, "reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 0}
    engine = engine_of(ORTModule(model) if wraps else model, {"zero_optimization": zero})
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(1, WORDS, (16, 128), generator=generator)
        lengths = torch.full((16, 1), 128) if dist.get_rank() else torch.randint(4, 16, (16, 1), generator=generator)
        mask = (torch.arange(128) < lengths).long()
        loss = engine(input_ids=ids * mask, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if wraps:
        computed = engine.module.explain("sparsity")
        assert ("all are computed" in computed) == bool(dist.get_rank()), computed
    engine.destroy()
    return losses


class Turned(Net):
    """The second rank's blocks come in the other order."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.scale
        for block in (*self.blocks,)[:: -1 if dist.get_rank() else 1]:
            x = block(x)
        return F.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), labels.flatten())


def in_other_orders(report: Path) -> None:
    """A step of ranks that run blocks in different orders; a rank that is told so ends."""
    engine = engine_of(ORTModule(Turned()), {"zero_optimization": {"stage": 3}})
    with ending(report):
        engine.backward(engine(*batch(0)))


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """All parameters at this rank, gathered where they are in shards."""
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_status")):
            found[name] = parameter.detach().float().clone()
    engine.destroy()
    return found
