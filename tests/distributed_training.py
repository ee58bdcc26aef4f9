"""Training a small model, in one process on whole batches or at each rank on its share of them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from parity import captures
from ranks import device
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from onnxtrain import Options, ORTModule, verify
from onnxtrain.engine.state import State
from onnxtrain.errors import BackendError, ModuleError, OnnxTrainError
from onnxtrain.optim import step_in_backward

STEPS, ROWS, WIDTH, WORDS = 5, 8, 15, 32  # an odd width: shards are padded
Trained = tuple[list[float], dict[str, torch.Tensor]]


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner, self.outer = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Net(torch.nn.Module):
    """Embedding, a parameter of the root's own, two blocks, a head and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, *, deep: bool = True) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for block in self.blocks[: 2 if deep else 1]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Deep(Net):
    """More blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block() for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Turned(Net):
    """The second rank's blocks come in the other order."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for block in (*self.blocks,)[:: -1 if dist.get_rank() else 1]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Tied(Net):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Normalized(torch.nn.Module):
    """Batch statistics, which each rank takes of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(WORDS, WIDTH), torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.embedding(ids).flatten(0, 1))), labels.flatten())


COMPRESSING = {h.__name__: h for h in (fp16_compress_hook, bf16_compress_hook, powerSGD_hook)}
NETS = {net.__name__: net for net in (Net, Deep, Turned, Tied, Normalized)}


def data(model: str) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches at every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        if model in NETS:
            ids, labels = torch.randint(0, WORDS, (2, ROWS, 6), generator=generator)
            batch = {"ids": ids, "labels": labels}
        else:
            batch = models.ARCHITECTURES[model].batch(ROWS, 6)
        yield {name: tensor.to(device()) for name, tensor in batch.items()}


def first(model: str) -> dict[str, torch.Tensor]:
    """This rank's share of the first batch."""
    return {name: share(tensor) for name, tensor in next(data(model)).items()}


def build(model: str, backend: str | None = None, **options: Any) -> torch.nn.Module:
    """A model of this page or of ``models``, the same at every rank; an ORTModule where there is a backend."""
    torch.manual_seed(0)
    made = (NETS[model]() if model in NETS else models.build(model)).to(device())
    return made if backend is None else ORTModule(made, options=Options(backend=backend, **options))


def share(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows; all of them where there is one process."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else tensor


def mean(loss: torch.Tensor) -> float:
    """The mean over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def alone(model: torch.nn.Module) -> torch.nn.Module:
    """No distribution at all."""
    return model


def ddp(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Replicas whose gradients are averaged."""
    return DistributedDataParallel(model, **settings)


def fsdp(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Parameters, gradients and optimizer state in shards, gathered for the model as a whole."""
    return fully_shard(model, **settings)


def fsdp_blocks(model: torch.nn.Module, *, inner: str, **settings: Any) -> torch.nn.Module:
    """Shards that are gathered for one block at a time, which is an ORTModule; the rest is eager PyTorch."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(ORTModule(block, options=Options(backend=inner)), **settings)
    return fully_shard(model, **settings)


def fsdp_within(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Shards that are gathered for one block at a time, within one graph."""
    for block in _blocks(model):
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def fsdp_before(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """The same, of a module that is sharded before it is wrapped."""
    if not isinstance(model, ORTModule):
        return fsdp_within(model, **settings)
    return ORTModule(fsdp_within(model.module, **settings), options=model.options)


def fsdp_blocks_alone(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """The blocks' parameters are in shards; the others are whole, and their gradients averaged by hand."""
    for block in _blocks(model):
        fully_shard(block, **settings)
    inner = {id(p) for block in _blocks(model) for p in block.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inner:
            parameter.register_post_accumulate_grad_hook(_average)
    return model


def _average(parameter: torch.Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def _blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    return model.bert.encoder.layer if hasattr(model, "bert") else model.blocks


def train(
    model: str,
    how: Callable[..., torch.nn.Module],
    backend: str | None = None,
    *,
    steps: range = range(STEPS),
    parts: int = 1,
    clip: float | None = None,
    autocast: bool = False,
    alternate: bool = False,
    apart: bool = False,
    load: Path | None = None,
    save: Path | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Trained:
    """The losses of all steps and of an evaluation, and the state after them, whole and under plain names.

    Args:
        model: a name for ``build``.
        how: what distributes it.
        backend: eager PyTorch where it is None.
        steps: which batches of ``data`` it is trained on.
        parts: a batch comes in so many parts, whose gradients are accumulated.
        clip: the largest norm of all gradients together.
        autocast: the forward pass runs in bfloat16 where autocast says so.
        alternate: every other step leaves a block out, whose parameters have no gradient then.
        apart: parameters are updated in the backward pass.
        load: folder of a checkpoint to go on from.
        save: folder that receives a checkpoint.
        options: of ORTModule.
        settings: further arguments of what distributes it.
    """
    module = how(build(model, backend, **(options or {})), **settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if apart:
        step_in_backward(optimizer)
    if load is not None:
        restore(module, optimizer, load)
    losses, batches = [], [{name: share(tensor) for name, tensor in batch.items()} for batch in data(model)]
    for step in steps:
        optimizer.zero_grad()
        further = {"deep": step % 2 == 0} if alternate else {}
        total = torch.zeros((), device=device())
        for part in range(parts):
            given = {name: tensor.chunk(parts)[part] for name, tensor in batches[step].items()}
            with waiting(module, part + 1 < parts):
                with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
                    loss = result(module(**given, **further))
                (loss / parts).backward()
            total += loss.detach() / parts
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(mean(total))
    module.eval()
    with torch.no_grad():
        losses.append(mean(result(module(**batches[0])).clone()))
    if save is not None:
        store(module, optimizer, save)
    return losses, whole_state(module)


def result(output: Any) -> torch.Tensor:
    """The loss of a model of either kind."""
    return output if isinstance(output, torch.Tensor) else output.loss


@contextlib.contextmanager
def waiting(module: torch.nn.Module, wait: bool) -> Iterator[None]:
    """Gradients stay at their rank for now."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(not wait)
        yield
    else:
        with module.no_sync() if wait and hasattr(module, "no_sync") else contextlib.nullcontext():
            yield


def store(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write a checkpoint: each rank its shards."""
    model, moments = get_state_dict(module, optimizer)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder)


def restore(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read a checkpoint, whichever number of ranks wrote it."""
    model, moments = get_state_dict(module, optimizer)
    dcp.load({"model": model, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=moments)


def whole_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All of the state at every rank."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.clone().cpu() for name, tensor in state.items()}


def replicated(backend: str | None, hook: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of replicas whose gradients a hook of torch compresses before they are averaged.

    Args:
        backend: eager PyTorch where it is None.
        hook: the name of ``torch.distributed.algorithms.ddp_comm_hooks``.
    """
    model = DistributedDataParallel(build("Deep", backend))
    state = PowerSGDState(None, start_powerSGD_iter=2) if hook == "powerSGD_hook" else None
    model.register_comm_hook(state, COMPRESSING[hook])
    return _stepped(model, [{n: share(t) for n, t in batch.items()} for batch in data("Deep")])


def uneven(backend: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of replicas of which the first has two batches less."""
    model = DistributedDataParallel(build("Deep", backend))
    batches = [{n: share(t) for n, t in batch.items()} for batch in data("Deep")]
    with model.join():
        return _stepped(model, batches[: STEPS - 2] if dist.get_rank() == 0 else batches)


def _stepped(model: torch.nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> Any:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, whole_state(model)


def kept_back(how: Callable[..., torch.nn.Module]) -> list[torch.Tensor | None]:
    """The gradients that a rank has after a backward pass that waits."""
    module = how(build("Net", "torch"))
    with waiting(module, True):
        module(**first("Net")).backward()
    return [parameter.grad for parameter in module.parameters()]


def order_of_work(segments: int) -> list[str]:
    """In which order a rank computes parts of the second backward pass and begins to average buckets of gradients."""
    model = DistributedDataParallel(build("Deep", "torch", segments=segments), bucket_cap_mb=0.001)
    found: list[str] = []

    def averaged(state, bucket):  # torch reads annotations, and not as text
        found.append("bucket")
        return allreduce_hook(dist.group.WORLD, bucket)

    take = State.take
    model.register_comm_hook(None, averaged)
    with mock.patch.object(State, "take", lambda state, part: (found.append("part"), take(state, part))[1]):
        for _ in range(2):
            found.clear()
            model(**first("Deep")).backward()
    return found


def most_gathered() -> tuple[int, int]:
    """Most bytes of parameters that are gathered at once: within one graph, and by FSDP2 in eager PyTorch."""
    return _most_gathered("torch"), _most_gathered(None)


def _most_gathered(backend: str | None) -> int:
    module, seen = fsdp_within(build("Deep", backend), reshard_after_forward=True), [0]
    states = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
    groups = [state._fsdp_param_group for state in states]
    wait = FSDPParamGroup.wait_for_unshard

    def watched(group: FSDPParamGroup) -> None:
        wait(group)
        gathered = (t for g in groups for p in g.fsdp_params for t in getattr(p, "all_gather_outputs", ()))
        seen.append(sum(t.untyped_storage().nbytes() for t in gathered))

    for _ in range(3):
        with mock.patch.object(FSDPParamGroup, "wait_for_unshard", watched):
            module(**first("Deep")).backward()
    return max(seen)


def graphs_of_shards() -> list[int]:
    """How many graphs a module with sharded blocks has after some steps."""
    found = []
    for how in (fsdp_within, fsdp_before):
        module = how(build("Deep", "torch"))
        for _ in range(3):
            module(**first("Deep")).backward()
        found.append(captures(module))
    return found


def told_of_shards(how: Callable[..., torch.nn.Module]) -> tuple[int, int, list[float]]:
    """The peak that is told of a sharded model, that of one that is whole, and losses after it was asked."""
    batch, module = first("Deep"), how(build("Deep", "torch"))
    losses = []
    for _ in range(2):
        told = module.memory_report(**batch).peak
        loss = module(**batch)
        loss.backward()
        losses.append(loss.item())
    return told, build("Deep", "torch").memory_report(**batch).peak, losses


def messages(how: Callable[..., torch.nn.Module]) -> list[str]:
    """What the library says to the user of this rank about a first step."""
    logger, found = logging.getLogger("onnxtrain"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    try:
        how(build("Net", "torch", log_level="INFO"))(**first("Net")).backward()
    finally:
        logger.removeHandler(handler)
    return found


def verified(how: Callable[..., torch.nn.Module]) -> set[str]:
    """The kinds of tensors that were compared in a first step."""
    wrapped = build("Net", "torch", verify=True)
    how(wrapped)(**first("Net")).backward()
    return {comparison.kind for comparison in wrapped.verification.comparisons}


def in_other_orders(report: Path) -> None:
    """A step of ranks that run blocks in different orders; a rank that is told so ends."""
    wrapped = fsdp_within(build("Turned", "torch"))
    with ending(report):
        wrapped(**first("Turned")).backward()


@contextlib.contextmanager
def ending(report: Path) -> Iterator[None]:
    """Within it an error of ours ends the process, as it does a program; what it says is written down before."""
    try:
        yield
    except OnnxTrainError as error:
        report.write_text(str(error))
        os._exit(1)


def _blocks_as_one() -> None:
    wrapped = build("Net", "torch")
    fully_shard([*wrapped.blocks])
    fully_shard(wrapped)(**first("Net"))


def _forward_after_a_step() -> None:
    module = fully_shard(build("Net", "torch"), reshard_after_forward=True)
    module(**first("Net")).backward()
    module.forward(**first("Net"))


def _flat(wrapped: torch.nn.Module, whole: bool) -> torch.nn.Module:
    return FullyShardedDataParallel(wrapped, device_id=torch.device("cpu"), use_orig_params=whole)


REFUSED: dict[str, Callable[[], Any]] = {
    "DataParallel inside": lambda: ORTModule(torch.nn.DataParallel(build("Net"))),
    "DistributedDataParallel inside": lambda: ORTModule(ddp(build("Net"))),
    "blocks sharded as one": _blocks_as_one,
    "sharded blocks on onnxruntime": lambda: fsdp_within(build("Net", "onnxruntime"))(**first("Net")),
    "forward instead of the module": lambda: fully_shard(build("Net", "torch")).forward(**first("Net")),
    "forward after a step": _forward_after_a_step,
    "FSDP1 inside": lambda: ORTModule(_flat(build("Net"), True)),
    "FSDP1, views": lambda: _flat(build("Net", "torch"), True)(**first("Net")),
    "FSDP1, flat": lambda: _flat(build("Net", "torch"), False)(**first("Net")),
    "verify of a sharded ORTModule": lambda: fully_shard(build("Net", "torch", verify=True))(**first("Net")),
    "verify of a sharded module": lambda: verify(fully_shard(build("Net")), first("Net")),
}


def refusal(case: str) -> str:
    """The message with which something is refused; empty where it is not."""
    try:
        REFUSED[case]()
    except (ModuleError, BackendError) as error:
        return str(error)
    return ""
