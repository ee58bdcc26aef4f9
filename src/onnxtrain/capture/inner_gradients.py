"""``torch.autograd.grad`` within a forward pass, recorded as one operator that the gradient stage writes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.capture.substitutes import substitute
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor


@torch.library.custom_op(
    "onnxtrain::gradients",
    mutates_args=(),
    schema="(Tensor[] outputs, Tensor[] seeds, Tensor[] inputs, bool allow_unused) -> Tensor[]",
)
def gradients(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor], allow_unused: bool
) -> list[Tensor]:
    """What capture records; the graph has the backward pass in its place."""
    raise RuntimeError("onnxtrain::gradients is written out in the graph of a module; it does not run by itself")


@gradients.register_fake
def _(outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor], allow_unused: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


def _no_gradient(ctx: Any, *dys: Any) -> Any:
    raise RuntimeError("recorded gradients are differentiated in their graph")


gradients.register_autograd(_no_gradient)


@gradients.register_vmap
def _(
    info: Any,
    in_dims: tuple[Sequence[int | None], Sequence[int | None], Sequence[int | None], None],
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    inputs: Sequence[Tensor],
    allow_unused: bool,
) -> tuple[list[Tensor], list[int]]:
    """Gradients for each element: those of the tensors with the axis, where all that is asked for have it.

    Where only what the gradients start from has the axis, each element has an operator of its own.

    Raises:
        CaptureError: one of these is the same for all elements.
    """
    of_outputs, of_seeds, of_inputs, _ = in_dims
    if not any(dim is not None for dim in (*of_outputs, *of_inputs)):
        rows = [
            [dy if at is None else dy.select(at, i) for dy, at in zip(seeds, of_seeds, strict=True)]
            for i in range(int(info.batch_size))
        ]
        every = [torch.ops.onnxtrain.gradients(outputs, row, inputs, allow_unused) for row in rows]
        return [torch.stack(found) for found in zip(*every, strict=True)], [0] * len(inputs)
    dims = [dim for dim in of_inputs if dim is not None]
    if len(dims) < len(inputs):
        raise CaptureError(
            "torch.autograd.grad within torch.vmap, of a tensor that is the same for all elements",
            cure="use torch.func.grad of a function that is given the tensor, or ask in a loop",
        )
    every = zip(outputs, seeds, of_outputs, of_seeds, strict=True)
    given = [(y, dy, to, at) for y, dy, to, at in every if to is not None]
    if not given:  # what is asked about depends on no element
        return [torch.zeros_like(x) for x in inputs], dims
    ys = [y for y, *_ in given]
    dys = [dy.unsqueeze(to).expand_as(y) if at is None else dy.movedim(at, to) for y, dy, to, at in given]
    return torch.ops.onnxtrain.gradients(ys, dys, list(inputs), allow_unused), dims


@substitute(torch.autograd.grad)
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients as one operator.

    Where an input is not used its gradient is zeros, for which ``allow_unused`` has to be said. Of several gradients
    that are given at once each has an operator of its own.

    Raises:
        CaptureError: the gradient is one of something that is no tensor.
    """
    ys, xs = ([v] if isinstance(v, Tensor) else list(v) for v in (outputs, inputs))
    if not all(isinstance(v, Tensor) for v in (*ys, *xs)):
        raise CaptureError("torch.autograd.grad of an edge of autograd's graph", cure="ask for a tensor's gradient")
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [None] * len(ys))
    may_miss = bool(allow_unused) or materialize_grads
    if is_grads_batched:
        rows = zip(*(dy.unbind() for dy in given if dy is not None), strict=True)
        every = [torch.ops.onnxtrain.gradients(ys, row, xs, may_miss) for row in rows]
        made = [torch.stack(found) for found in zip(*every, strict=True)]
    else:
        seeds = [torch.ones_like(y) if dy is None else dy for y, dy in zip(ys, given, strict=True)]
        made = torch.ops.onnxtrain.gradients(ys, seeds, xs, may_miss)
    return tuple(made) if create_graph else tuple(dx.detach() for dx in made)


@substitute(Tensor.backward, torch.autograd.backward)
def backward(*args: Any, **kwargs: Any) -> None:
    """Refused: it leaves gradients on parameters.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "backward() within a forward pass leaves gradients on parameters, which a graph cannot",
        cure="take them from torch.autograd.grad(..., create_graph=True), or call it outside of the module",
    )
