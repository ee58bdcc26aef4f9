"""Steps of what ``torch.compile`` made beside the same steps in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from parity import same
from torch.utils import _pytree as pytree

from onnxtrain.torchdynamo import Piece, pieces
from onnxtrain.torchdynamo.piece import forget


def compiled(function: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """What the backend makes of a module or function; earlier pieces are forgotten."""
    torch._dynamo.reset()
    forget()
    return torch.compile(function, backend="onnxtrain", dynamic=dynamic, options=options or None)


def captures() -> int:
    """How many graphs there are."""
    return sum(piece.captures for piece in pieces())


def piece() -> Piece:
    """The only piece there is."""
    (found,) = pieces()
    return found


def same_steps(
    build: Callable[[], Any],
    inputs: Callable[[], Sequence[Any]],
    steps: int = 3,
    dynamic: bool | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Steps of both with equal seeds: outputs, gradients, buffers and what is written into inputs are compared.

    Gives both callables afterwards.
    """
    torch.manual_seed(0)
    eager = build()
    ours = copy.deepcopy(eager)
    made = compiled(ours, dynamic, **options)
    given = inputs()
    batches = [given, copy.deepcopy(given)]
    for step in range(steps):
        outputs = [_step(f, batch, step) for f, batch in zip((made, eager), batches, strict=True)]
        same(*outputs)
        _same_tensors(*(pytree.tree_leaves(batch) for batch in batches))
        if isinstance(eager, torch.nn.Module):
            _same_tensors(*([*m.parameters(), *m.buffers()] for m in (ours, eager)))
    return made, eager


def _step(function: Any, batch: Sequence[Any], seed: int) -> Any:
    """One call and its backward pass."""
    if isinstance(function, torch.nn.Module):
        function.zero_grad()
    torch.manual_seed(seed)
    output = function(*batch)
    losses = [t.double().square().sum() for t in pytree.tree_leaves(output) if _has_history(t)]
    if losses:
        torch.stack(losses).sum().backward()
    return output


class Stack(torch.nn.Module):
    """Layers of more than one bucket of DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


def gradients_of_a_rank(is_compiled: bool) -> tuple[list[torch.Tensor], int]:
    """What DistributedDataParallel leaves on the parameters, and how many pieces there are."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=1)
    run = compiled(model) if is_compiled else model
    torch.manual_seed(torch.distributed.get_rank())
    run(torch.randn(4, 512)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], len(pieces()) if is_compiled else 0


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _same_tensors(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a.detach(), b.detach())
            if b.is_leaf and b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)
