"""``torch.autograd.grad`` within a forward pass, recorded as one operator that the gradient stage writes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.utils import _pytree as pytree

from onnxtrain.capture.substitutes import instead_of, substitute
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

    Where an input is not used its gradient is zeros, for which ``allow_unused`` has to be said.

    Raises:
        CaptureError: several gradients are asked for at once, or of something that is no tensor.
    """
    if is_grads_batched:
        raise CaptureError("torch.autograd.grad(is_grads_batched=True) within a forward pass", cure="ask in a loop")
    ys, xs = ([v] if isinstance(v, Tensor) else list(v) for v in (outputs, inputs))
    if not all(isinstance(v, Tensor) for v in (*ys, *xs)):
        raise CaptureError("torch.autograd.grad of an edge of autograd's graph", cure="ask for a tensor's gradient")
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [None] * len(ys))
    seeds = [torch.ones_like(y) if dy is None else dy for y, dy in zip(ys, given, strict=True)]
    made = torch.ops.onnxtrain.gradients(ys, seeds, xs, bool(allow_unused) or materialize_grads)
    return tuple(made) if create_graph else tuple(dx.detach() for dx in made)


@instead_of(eager_transforms, "grad_and_value_impl")
def grad_and_value(
    function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, args: Sequence[Any], kwargs: Any
) -> Any:
    """``torch.func.grad_and_value``: the gradients with respect to copies of arguments, and the value."""
    chosen = [n % len(args) for n in (argnums if isinstance(argnums, tuple) else (argnums,))]
    given = [pytree.tree_map_only(Tensor, _own, a) if i in chosen else a for i, a in enumerate(args)]
    with torch.enable_grad():
        made = function(*given, **kwargs)
        value = made[0] if has_aux else made
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            raise CaptureError("torch.func.grad of what is no floating number", cure="let the function return a scalar")
        leaves, spec = pytree.tree_flatten([given[i] for i in chosen])
        found = grad(value, leaves, create_graph=True, materialize_grads=True)
    gradients = pytree.tree_unflatten(found, spec)
    told = tuple(gradients) if isinstance(argnums, tuple) else gradients[0], made
    return told if torch.is_grad_enabled() else pytree.tree_map_only(Tensor, torch.detach, told)


@instead_of(eager_transforms, "grad_impl")
def grad_alone(
    function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, args: Sequence[Any], kwargs: Any
) -> Any:
    """``torch.func.grad``."""
    found, made = grad_and_value(function, argnums, has_aux, args, kwargs)
    return (found, made[1]) if has_aux else found


def _own(argument: Tensor) -> Tensor:
    """A copy that no one else reads, so that a gradient is one of what the function does with it."""
    return argument.clone() if argument.requires_grad else argument.clone().requires_grad_()


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
