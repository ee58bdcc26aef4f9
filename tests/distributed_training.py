"""Training a small model, at one process on whole batches or at each rank on its share of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from onnxtrain import Options, ORTModule

STEPS, ROWS, WIDTH, WORDS = 5, 8, 15, 32  # an odd width: shards are padded
Trained = tuple[list[float], dict[str, torch.Tensor]]


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 2 * WIDTH),
            torch.nn.Linear(2 * WIDTH, WIDTH),
        )

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


def tied() -> Net:
    """The head's weight is the embedding's."""
    net = Net()
    net.head.weight = net.embedding.weight
    return net


class Normalized(torch.nn.Module):
    """Batch statistics, which each rank takes of its own rows; the buffers of rank 0 are everybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(WORDS, WIDTH), torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.embedding(ids).flatten(0, 1))), labels.flatten())


def data(model: str, steps: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches at every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        if model in models.ARCHITECTURES:
            yield models.ARCHITECTURES[model].batch(ROWS, 6)
        else:
            ids, labels = torch.randint(0, WORDS, (2, ROWS, 6), generator=generator)
            yield {"ids": ids, "labels": labels}


def build(model: str, backend: str | None, **options: Any) -> torch.nn.Module:
    """A model of this page or of ``models``; an ORTModule where there is a backend."""
    torch.manual_seed(0)
    made = models.build(model) if model in models.ARCHITECTURES else globals()[model]()
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


def alone(model: torch.nn.Module, **_: Any) -> torch.nn.Module:
    """No distribution at all."""
    return model


def ddp(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Replicas whose gradients are averaged."""
    return torch.nn.parallel.DistributedDataParallel(model, **settings)


def fsdp(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Parameters, gradients and optimizer state in shards, gathered for the model as a whole."""
    return fully_shard(model, **settings)


def train(
    model: str,
    how: Callable[..., torch.nn.Module],
    backend: str | None = None,
    *,
    parts: int = 1,
    options: dict[str, Any] | None = None,
    alternate: bool = False,
    **settings: Any,
) -> Trained:
    """The losses of all steps, and the state after them, whole and under plain names.

    Args:
        model: a name for ``build``.
        how: what distributes it.
        backend: eager PyTorch where it is None.
        parts: a batch comes in so many parts, whose gradients are accumulated.
        options: of ORTModule.
        alternate: every other step leaves a block out, whose parameters have no gradient then.
        settings: further arguments of what distributes it.
    """
    module = how(build(model, backend, **(options or {})), **settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    losses = []
    for step, batch in enumerate(data(model)):
        optimizer.zero_grad()
        total, further = torch.zeros(()), {"deep": step % 2 == 0} if alternate else {}
        for part in range(parts):
            with waiting(module, part + 1 < parts):
                loss = result(module(**{n: share(t).chunk(parts)[part] for n, t in batch.items()}, **further))
                (loss / parts).backward()
            total += loss.detach() / parts
        optimizer.step()
        losses.append(mean(total))
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


def whole_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All of the state at every rank."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.clone() for name, tensor in state.items()}
