"""A ``torch.autograd.Function``: its own forward and backward pass, run by torch's autograd with a real context."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from onnxtrain.errors import BackendError
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.python_calls import PYTHON_OP, Place, PythonCall

Tensor = torch.Tensor
_PLAIN = (bool, int, float, str, type(None))


class _Context:
    """What the backward pass of one call needs; nothing else holds the call's saved tensors.

    Args:
        edges: for each tensor returned where its gradient enters torch's graph; None where it has none.
        received: filled by the backward pass, a gradient for each tensor whose gradient is wanted.
        like: shape, element type and device of these tensors.
    """

    def __init__(
        self, edges: list[GradientEdge | None], received: list[Tensor | None], like: list[tuple[Any, ...]]
    ) -> None:
        self.edges, self.received, self.like = edges, received, like


class _Source(torch.autograd.Function):
    """Tensors that are not leaves, so that they may be written into, and whose gradients end in a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], received: list[Tensor | None]) -> tuple[Tensor, ...]:
        ctx.received = received
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.received[:] = gradients
        return None, None, None


@lowering(PYTHON_OP, domain=DOMAIN, host=(0,), view=True)
def python_op(
    sizes: tuple[int, ...] | None = None,
    *tensors: Tensor,
    call: PythonCall,
    needs_input_grad: Sequence[int] = (),
    **_: Any,
) -> Any:
    """Call ``apply``; the autograd context comes first, then the tensors that it returned."""
    given = [x.clone() if i in call.changed else x.detach() for i, x in enumerate(tensors)]
    wanted = [i for i, needed in enumerate(needs_input_grad) if needed]
    received: list[Tensor | None] = [None] * len(wanted)
    like = [(x.shape, x.dtype, x.device) for x in given]
    numbers = {leaf.index for leaf in call.leaves if isinstance(leaf, Place) and leaf.kind == "number"}
    with torch.set_grad_enabled(bool(wanted)), _autocast(call, given):
        if wanted:
            sources = _Source.apply(torch.empty(0, requires_grad=True), [given[i] for i in wanted], received)
            for i, source in zip(wanted, sources, strict=True):
                given[i] = source
        versions = [x._version for x in given]
        operands = [x.item() if i in numbers else x for i, x in enumerate(given)]
        returned = call.function.apply(*call.arguments(operands, sizes or ()))
    _check_changes(call, given, versions)
    results = _tensors_of(call, returned)
    edges = [get_gradient_edge(y) if y.requires_grad else None for y in results] if wanted else []
    if call.forward_reuse is not None:
        results = _reused(call, call.forward_reuse, results, given)
    results += [given[i] for i in call.shown]
    context = _Context(edges, received, [like[i] for i in wanted]) if wanted else None
    made = (context, *(y.detach() for y in results))
    return made if len(made) > 1 else context


@contextlib.contextmanager
def _autocast(call: PythonCall, tensors: Sequence[Tensor]) -> Any:
    """The autocast region that the call was captured in, or none: regions around the graph do not concern it."""
    device, dtype = call.autocast or (next((t.device.type for t in tensors), "cpu"), None)
    if dtype is None and not torch.is_autocast_enabled(device):
        yield
    else:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            yield


def _check_changes(call: PythonCall, given: Sequence[Tensor], versions: Sequence[int]) -> None:
    for index, (x, before) in enumerate(zip(given, versions, strict=True)):
        if x._version != before and index not in call.changed:
            raise BackendError(
                f"{call.name} changed its tensor {index} in place, and did not when it was captured",
                cure="let its forward pass work on a copy; a class with infer_shape cannot change tensors in place",
            )


def _tensors_of(call: PythonCall, returned: Any) -> list[Tensor]:
    """The tensors among the results; all else must be as it was when the call was captured."""
    leaves = pytree.tree_leaves(returned)
    kinds = [isinstance(x, Tensor) for x in leaves]
    expected = [isinstance(x, Place) and x.kind == "tensor" for x in call.results]
    if kinds != expected:
        raise BackendError(
            f"{call.name} returned {sum(kinds)} tensors among {len(kinds)} results, and was captured with "
            f"{sum(expected)} among {len(expected)}",
            cure="return the same number of tensors, in the same places, in every call",
        )
    for index, (leaf, before) in enumerate(zip(leaves, call.results, strict=True)):
        if isinstance(before, _PLAIN) and leaf != before:
            raise BackendError(
                f"{call.name} returned {leaf!r} as result {index}, which was {before!r} when it was captured",
                cure="return a tensor: other results are constants of the graph",
            )
    return [x for x in leaves if isinstance(x, Tensor)]


def _reused(call: PythonCall, declared: Sequence[int], results: list[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The results, none sharing memory that it was not declared to share: the plan counts on it."""
    made = []
    for index, (y, wanted) in enumerate(zip(results, declared, strict=True)):
        shared = [i for i, x in enumerate(given) if _shares(x, y)]
        if wanted != -1 and wanted not in shared:
            real = f"tensor {shared[0]}" if shared else "none"
            raise BackendError(
                f"alias_input of {call.name} says that output {index} reuses the memory of tensor {wanted}; "
                f"it reuses that of {real}",
                cure="return what forward really does from alias_input, -1 where it makes new memory",
            )
        if wanted == -1 and shared:
            warnings.warn(
                f"output {index} of {call.name} reuses the memory of tensor {shared[0]}, which alias_input does not "
                "say: it is copied",
                stacklevel=2,
            )
            y = y.detach().clone()
        made.append(y)
    return made


def _shares(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and x.untyped_storage()._cdata == y.untyped_storage()._cdata


@lowering(f"{PYTHON_OP}Grad", domain=DOMAIN, view=True)
def python_op_grad(
    context: _Context,
    *dys: Tensor | None,
    func_name: str,
    needs_input_grad: Sequence[int],
    tensor_reuse_map: Sequence[int] | None = None,
    needed: Sequence[bool],
    final: Sequence[bool],
    **_: Any,
) -> Any:
    """Run the backward pass; None where it gives no gradient and only the caller asks, zeros where an operator does."""
    pairs = [(e, dy) for e, dy in zip(context.edges, dys, strict=False) if e is not None and dy is not None]
    context.edges = []
    if pairs:
        torch.autograd.backward([e for e, _ in pairs], [dy for _, dy in pairs])
    del pairs
    received = iter(zip(context.received, context.like, strict=True))
    made: list[Tensor | None] = []
    for index, wanted in enumerate(needs_input_grad):
        dx, like = next(received) if wanted else (None, None)
        if dx is None and like is not None and needed[index] and not final[index]:
            dx = torch.zeros(like[0], dtype=like[1], device=like[2])
        made.append(dx)
    context.received = []
    if tensor_reuse_map is not None:
        made = _own_memory(func_name, made, tensor_reuse_map, dys)
    return made[0] if len(made) == 1 else tuple(made)


def _own_memory(
    name: str, made: list[Tensor | None], declared: Sequence[int], dys: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients, copied where they share memory of an output's gradient and were not declared to."""
    found = []
    for index, (dx, wanted) in enumerate(zip(made, declared, strict=True)):
        shared = [i for i, dy in enumerate(dys) if dx is not None and dy is not None and _shares(dx, dy)]
        if dx is not None and wanted > 0 and wanted - 1 not in shared:
            raise BackendError(
                f"alias_input of {name} says that the gradient of tensor {index} reuses that of output {wanted - 1}; "
                "it does not",
                cure="return what backward really does from alias_input, -1 where it makes new memory",
            )
        if dx is not None and wanted == -1 and shared:
            warnings.warn(
                f"the gradient of tensor {index} of {name} reuses that of output {shared[0]}, which alias_input does "
                "not say: it is copied",
                stacklevel=2,
            )
            dx = dx.clone()
        found.append(dx)
    return found
