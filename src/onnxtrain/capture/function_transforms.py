"""``torch.func`` within a forward pass: derivatives of a function, recorded as gradients of what it computes.

And the calls that torch cannot record within ``vmap`` as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch import eager_transforms, predispatch, pyfunctorch
from torch._functorch import vmap as vmapping
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from onnxtrain.capture.inner_gradients import grad
from onnxtrain.capture.keepers import node_of
from onnxtrain.capture.substitutes import instead_of, substitute
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
Numbers = int | tuple[int, ...] | None
_functorch = torch._C._functorch
_COPIES: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # which alone require a gradient
_with_axis, _without_axis = vmapping._add_batch_dim, vmapping._maybe_remove_batch_dim


class _Call:
    """A call of a function with arguments of its own, and what is differentiated of it.

    Args:
        function: the function.
        args: its arguments.
        argnums: which of them it is differentiated with respect to, one or several; None for all.
        has_aux: whether its second result is passed through.
        kwargs: its other arguments.

    Raises:
        CaptureError: it gives something other than floating point tensors.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], argnums: Numbers, has_aux: bool, kwargs: Any = None
    ) -> None:
        every = range(len(args)) if argnums is None else argnums if isinstance(argnums, tuple) else (argnums,)
        chosen = [n % len(args) for n in every]
        given = [pytree.tree_map_only(Tensor, own_copy, a) if i in chosen else a for i, a in enumerate(args)]
        with torch.enable_grad():
            made = function(*given, **(kwargs or {}))
        self.value, self.aux = made if has_aux else (made, None)
        found = tuple(given[i] for i in chosen)
        self.inputs, self._inputs = pytree.tree_flatten(found[0] if isinstance(argnums, int) else found)
        self.outputs, self._outputs = pytree.tree_flatten(self.value)
        if not all(isinstance(y, Tensor) and y.is_floating_point() for y in self.outputs):
            raise CaptureError("a derivative of what is no floating point tensor", cure="let the function return such")

    def gradients(self, seeds: Sequence[Tensor]) -> list[Tensor]:
        """A gradient for each of the inputs, from one for each of the outputs; it can be differentiated."""
        with torch.enable_grad():
            return [*grad(self.outputs, self.inputs, seeds, create_graph=True, materialize_grads=True)]

    def like_inputs(self, tensors: Sequence[Tensor]) -> Any:
        """Tensors in the structure of the inputs."""
        return pytree.tree_unflatten([*tensors], self._inputs)

    def like_outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Tensors in the structure of the outputs."""
        return pytree.tree_unflatten([*tensors], self._outputs)


@instead_of(eager_transforms, "grad_and_value_impl")
def grad_and_value(
    function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, args: Sequence[Any], kwargs: Any
) -> Any:
    """``torch.func.grad_and_value``: the gradients with respect to copies of arguments, and the value."""
    call = _Call(function, args, argnums, has_aux, kwargs)
    if not isinstance(call.value, Tensor) or call.value.dim():
        raise CaptureError("torch.func.grad of what is no number", cure="let the function return a scalar")
    slopes = call.like_inputs(call.gradients([torch.ones_like(call.value)]))
    return _told((slopes, (call.value, call.aux) if has_aux else call.value))


@instead_of(eager_transforms, "grad_impl")
def grad_alone(
    function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, args: Sequence[Any], kwargs: Any
) -> Any:
    """``torch.func.grad``."""
    slopes, made = grad_and_value(function, argnums, has_aux, args, kwargs)
    return (slopes, made[1]) if has_aux else slopes


@instead_of(eager_transforms, "_vjp_with_argnums")
def vjp(function: Callable[..., Any], *primals: Any, argnums: Numbers = None, has_aux: bool = False) -> Any:
    """``torch.func.vjp``, on which ``jacrev`` stands: the value, and a function that takes gradients of it.

    Where that is mapped over several gradients, the function is computed for each of them.
    """
    call, level = _Call(function, primals, argnums, has_aux), _functorch.maybe_current_level()

    def transposed(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        is_mapped = _functorch.maybe_current_level() != level
        at = _Call(function, primals, argnums, has_aux) if is_mapped else call
        return _told(at.like_inputs(at.gradients(pytree.tree_leaves(cotangents))))

    return (_told(call.value), transposed, *([_told(call.aux)] if has_aux else []))


@instead_of(eager_transforms, "_jvp_with_argnums")
def jvp(
    function: Callable[..., Any], primals: Any, tangents: Any, argnums: Numbers, *, strict: bool = False, has_aux: bool
) -> Any:
    """``torch.func.jvp``, on which ``jacfwd`` and ``hessian`` stand: the value, and its derivative along tangents.

    The gradient is linear in those it is computed from: its gradient with respect to them is the derivative.
    """
    call = _Call(function, primals, argnums, has_aux)
    given = pytree.tree_leaves(tangents)
    if any(isinstance(t, Tensor) and t.dtype != x.dtype for t, x in zip(given, call.inputs, strict=False)):
        raise CaptureError(
            "torch.func.jvp along tangents of another type than what they belong to", cure="cast the tangents before"
        )
    seeds = [own_copy(torch.zeros_like(y)) for y in call.outputs]
    with torch.enable_grad():
        found = grad(call.gradients(seeds), seeds, given, create_graph=True, materialize_grads=True)
    return _told((call.value, call.like_outputs(found), *([call.aux] if has_aux else [])))


@instead_of(eager_transforms, "_chunked_standard_basis_for_")
def bases(
    tensors: Sequence[Tensor], tensor_numels: Sequence[int], chunk_size: int | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """The rows of Jacobians that are asked for, some at a time: torch reads the places of their ones from a tensor."""
    total = sum(tensor_numels)
    starts = [0] if chunk_size is None else range(0, total, chunk_size)
    for start in starts:
        end = total if chunk_size is None else min(start + chunk_size, total)
        made, begin = [], 0
        for tensor, count in zip(tensors, tensor_numels, strict=True):
            row = torch.arange(start, end, device=tensor.device).unsqueeze(1)
            is_one = row == torch.arange(begin, begin + count, device=tensor.device)
            made.append(is_one.to(tensor.dtype).view(end - start, *tensor.shape))
            begin = begin + count
        yield tuple(made)


@instead_of(forward_ad, "make_dual")
def make_dual(tensor: Tensor, tangent: Tensor, *, level: int | None = None) -> Any:
    """Refused: a graph has no dual numbers.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "forward-mode automatic differentiation (torch.autograd.forward_ad) within a forward pass",
        cure="use torch.func.jvp or torch.func.jacfwd, which are part of the graph",
    )


@instead_of(vmapping, "_add_batch_dim")
def with_axis(tensor: Tensor, in_dim: int, vmap_level: int) -> Tensor:
    """What a mapped function is given: the axis is moved to the front first, where torch's record would lose it."""
    return _with_axis(tensor.movedim(in_dim, 0) if in_dim else tensor, 0, vmap_level)


@instead_of(vmapping, "_maybe_remove_batch_dim")
def without_axis(name: str, batched_output: Any, vmap_level: int, batch_size: int, out_dim: int | None) -> Any:
    """What a mapped function gives: the axis comes first, and is moved then, where torch's record would lose it."""
    is_mapped = isinstance(batched_output, Tensor) and vmap_level in _levels(batched_output)
    made = _without_axis(name, batched_output, vmap_level, batch_size, 0 if is_mapped and out_dim else out_dim)
    return made.movedim(0, out_dim) if is_mapped and out_dim else made


@substitute(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Any:
    """Within ``vmap``, where torch would take the size of the axis as a number: one in the place of the other's end."""
    if not _functorch.get_interpreter_stack() or out is not None or not all(t.dim() for t in tensors):
        return NotImplemented
    made, *rest = tensors
    for tensor in rest:
        axis = dim % tensor.dim()
        before, after = made.shape[axis], tensor.shape[axis]
        is_first = torch.arange(before + after, device=tensor.device) < before
        others = [0, 0] * (tensor.dim() - 1 - axis)
        longer = F.pad(made, [*others, 0, after]), F.pad(tensor, [*others, before, 0])
        made = torch.where(is_first.view(-1, *[1] * (tensor.dim() - 1 - axis)), *longer)
    return made


@substitute(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def times_vector(*operands: Tensor, **named: Any) -> Any:
    """Within ``vmap``, where torch.export loses a matrix that is the same for all: times a matrix of one column."""
    if not _functorch.get_interpreter_stack() or named:
        return NotImplemented
    matrix, vector = operands
    if vector.dim() != 1 or matrix.dim() < 2:
        return NotImplemented
    return torch.matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)


@substitute(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def requires_grad(self: Tensor) -> Any:
    """Of what comes of copies that alone require a gradient, because a function is differentiated: False."""
    return False if _comes_of_copies(self) else NotImplemented


@substitute(Tensor.is_leaf.__get__)  # type: ignore[attr-defined]
def is_leaf(self: Tensor) -> Any:
    """Of what comes of such copies alone: True."""
    return True if _comes_of_copies(self) else NotImplemented


def _comes_of_copies(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient through copies alone, by what is recorded of it."""
    mode: Any = get_proxy_mode()
    if mode is None or not _COPIES or not _is_tracked(tensor):
        return False
    nodes = functools.partial(node_of, mode.tracer)
    ends = {*map(nodes, _COPIES.values()), *map(nodes, filterfalse(_is_tracked, mode.tracer.tensor_tracker))}
    waiting, seen = [nodes(tensor)], {*ends, None}
    while waiting:
        node = waiting.pop()
        if node in seen or node is None or node.target is torch.ops.aten.detach.default:
            continue
        if node.op in ("placeholder", "get_attr"):
            return False
        seen.add(node)
        waiting += node.all_input_nodes
    return True


def _is_tracked(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def _told(results: Any) -> Any:
    """What the user is given, without gradients of its own where gradients are off."""
    return results if torch.is_grad_enabled() else pytree.tree_map_only(Tensor, torch.detach, results)


def own_copy(argument: Tensor) -> Tensor:
    """A copy that no one else reads, so that a gradient is one of what the function does with it.

    Within ``vmap`` it has the axis, so that each element has a gradient of its own.
    """
    stack = _functorch.get_interpreter_stack() or []
    missing = {interpreter.level() for interpreter in stack} - _levels(argument)
    if missing:
        is_there = _everywhere([pyfunctorch.VmapInterpreter(i) for i in stack if i.level() in missing], argument.device)
        return torch.where(is_there, argument, argument)
    if stack or not argument.is_floating_point():
        return argument.clone()
    if _is_tracked(argument):
        return argument.clone()
    made = argument.clone().requires_grad_()
    _COPIES[id(made)] = made
    return made


def _levels(tensor: Tensor) -> set[int]:
    """The levels of ``vmap`` whose axis a tensor has."""
    found = set()
    while _functorch.is_batchedtensor(tensor):
        found.add(_functorch.maybe_get_level(tensor))
        tensor = _functorch.get_unwrapped(tensor)
    return found


def _everywhere(levels: Sequence[pyfunctorch.VmapInterpreter], device: torch.device) -> Tensor:
    """True, with the axes of some levels, from the outermost on."""
    made = torch.ones((), dtype=torch.bool, device=device)
    for level in levels:
        made = predispatch._add_batch_dim(made.expand(level.batch_size()), 0, level.level())
    return made
