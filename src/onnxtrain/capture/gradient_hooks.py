"""``tensor.register_hook`` within a forward pass: the hook is called with the gradient in each backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch._subclasses import FakeTensor
from torch.autograd import graph
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from onnxtrain.capture import inner_gradients  # noqa: F401  (defines the operator of gradients)
from onnxtrain.capture.hidden_changes import HOOKS
from onnxtrain.capture.substitutes import substitute
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
_EARLIER = "register it where the tensor is computed"
_GRADIENTS = torch.ops.onnxtrain.gradients.default
Hooks: TypeAlias = list[Callable[[Tensor], Tensor | None]]


class GradientHook(torch.autograd.Function):
    """The tensor itself, whose gradient passes through hooks: recorded as any class of the user's own is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, hooks: Hooks) -> Tensor:
        """The tensor."""
        ctx.hooks = hooks
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """What the hooks return, in the order of their registration; one that returns nothing changes nothing."""
        gradient = gradients[0]
        for hook in ctx.hooks:
            made = hook(gradient)
            gradient = gradient if made is None else made
        return gradient, None


class HookOfView(GradientHook):
    """The same of a view: what changes its memory afterwards, be it the view itself, goes past the hooks."""

    is_written = False  # in a record: its result stands for the view


class _Handle:
    """What is returned in the place of torch's handle."""

    def remove(self) -> None:
        """Refused: the hook is in the graph.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(
            "the forward pass removes a hook of a tensor's gradient", cure="leave it: the next call has another tensor"
        )


@substitute(Tensor.register_hook)
def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Part of the graph, as if it were registered where the tensor is made.

    Raises:
        CaptureError: the tensor is an input or a parameter, or was used and then written to, or differentiated;
            or the hook reads others of the call, or waits for them.
    """
    if not self.requires_grad:
        return NotImplemented
    if self.is_leaf:
        raise _refused("of an input or a parameter", "register it outside of the module, once")
    if getattr(hook, "__code__", None) and hook.__code__.co_filename == graph.__file__:
        raise _refused("of several tensors at once", "register a hook for each of them, h.register_hook(...)")
    if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(list(_held_by(hook)))):
        raise _refused("that reads a tensor of the forward pass", "write a torch.autograd.Function that saves it")
    if self.is_complex():
        hook = _of_pairs(self, hook)
    earlier, call = getattr(self, HOOKS, (None, None))
    if earlier is not None and call is _call_of(self):
        earlier.append(hook)
        return _Handle()
    hooks, used = [hook], _call_of(self) if _is_used(self) else None
    if used is not None and not _may_come_earlier(self, used):
        raise _refused("of a tensor that was used and changed before, or differentiated", _EARLIER)
    with _earlier(self, used):
        if self._is_view():
            _hook_view(self, hooks)
        else:
            with torch.enable_grad():
                GradientHook.apply(torch.view_as_real(self) if self.is_complex() else self, hooks)
    setattr(self, HOOKS, (hooks, _call_of(self)))  # they, and the call whose result has them
    return _Handle()


def _of_pairs(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """A hook of complex numbers as one of the pairs of real numbers that they are: no node of a graph takes others.

    Raises:
        CaptureError: the tensor is a view, or shows conjugates.
    """
    if tensor._is_view() or tensor.is_conj() or tensor.is_neg():
        raise _refused(
            "of a view of complex numbers", "register it for torch.view_as_real of it, and compute with that"
        )

    def of_pairs(gradient: Tensor) -> Tensor | None:
        made = hook(torch.view_as_complex(gradient.contiguous()))
        return None if made is None else torch.view_as_real(made.resolve_conj())

    return of_pairs


@contextlib.contextmanager
def _earlier(tensor: Tensor, used: Node | None) -> Iterator[None]:
    """Hooks of a tensor that are recorded in the block stand right after the call that made it, before what reads it.

    Args:
        tensor: the tensor.
        used: the call, where something read its result before; else None.
    """
    if used is None:
        yield
        return
    mode: Any = get_proxy_mode()
    last, readers = next(iter(reversed(mode.tracer.graph.nodes))), [*used.users]
    yield
    place = used
    while (made := last.next).op != "root":
        place.append(made)
        place = made
    if tensor._is_view() and (hooked := _call_of(tensor)) is not None:  # of other tensors the memory has hooks
        for reader in readers:
            reader.replace_input_with(used, hooked)


def _may_come_earlier(tensor: Tensor, call: Node) -> bool:
    """Whether hooks of a tensor may be recorded right after the call that made it.

    Not where its memory was written to since, or a gradient was taken, which would go through them.
    """
    mode: Any = get_proxy_mode()
    if call.graph is not mode.tracer.graph:
        return False
    memory, node = _memory_of(tensor), call.next
    while node.op != "root":
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        of = [n.meta.get("val") for n in node.all_input_nodes] if writes else []
        if node.target is _GRADIENTS or any(isinstance(x, Tensor) and _memory_of(x) == memory for x in of):
            return False
        node = node.next
    return True


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _hook_view(view: Tensor, hooks: Hooks) -> None:
    """Let what is computed from a view be recorded as computed from the view with hooks: its memory is not written to.

    Raises:
        CaptureError: gradients are off, where the record would lose that of the view.
    """
    if not torch.is_grad_enabled():
        raise _refused("of a view, under torch.no_grad()", "register it where gradients are on")
    hooked, call = HookOfView.apply(view, hooks), _call_of(view)
    mode: Any = get_proxy_mode()
    if call is not None:
        tracker = mode.tracer.tensor_tracker
        tracker[hooked].proxy.node.meta["val"] = call.meta["val"]
        tracker[view] = tracker[hooked]


@substitute(Tensor.retain_grad)
def retain_grad(self: Tensor) -> Any:
    """Refused but for leaves, which keep their gradient anyway.

    Raises:
        CaptureError: it is a result.
    """
    if self.is_leaf or not self.requires_grad:
        return NotImplemented
    raise CaptureError(
        "the forward pass lets a result keep its gradient, which a graph does not have",
        cure="take it in a hook, h.register_hook(self.gradients.append), or from torch.autograd.grad",
    )


def _is_used(tensor: Tensor) -> bool:
    """Whether something was computed from a tensor, views of it among that."""
    call = _call_of(tensor)
    return call is not None and any(isinstance(u.meta.get("val"), Tensor) for u in call.users)


def _call_of(tensor: Tensor) -> Node | None:
    """The recorded call that made a tensor, or changed it in place since; None where nothing is recorded."""
    mode: Any = get_proxy_mode()
    known = None if mode is None else mode.tracer.tensor_tracker.get(tensor)
    return None if known is None else known.proxy.node


def _held_by(hook: Any) -> Iterator[Any]:
    """What a function holds: what it closes over, defaults, and what was bound to it."""
    if isinstance(hook, functools.partial):
        yield from (hook.args, hook.keywords, *_held_by(hook.func))
    for cell in getattr(hook, "__closure__", None) or ():
        yield cell.cell_contents
    yield from (getattr(hook, "__defaults__", None), getattr(hook, "__self__", None))


def _refused(what: str, cure: str) -> CaptureError:
    return CaptureError(f"the forward pass registers a hook for the gradient {what}", cure=cure)
