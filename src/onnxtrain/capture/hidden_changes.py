"""Changes in place that autograd does not see: of what is written under ``no_grad``, or to a detached tensor.

Eager PyTorch passes gradients on as if nothing had been written. A trace writes such a change so that autograd sees it:
the new content, and the gradient of the old one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.capture.lowering.aliases import memory_of
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor


def changed_behind(changed: Tensor, detached: Sequence[weakref.ref[Tensor]], name: str) -> Tensor | None:
    """The tensor whose gradient goes on although it, or a part of it, is changed; None where autograd sees the change.

    Args:
        changed: the tensor that is written to.
        detached: those that were detached, or what they are views of.
        name: of the function that writes.

    Raises:
        CaptureError: it is a parameter or an input, or nobody knows which.
    """
    if changed.requires_grad:
        found = [] if torch.is_grad_enabled() else [changed]
    else:
        memory = memory_of(changed)
        sources = [t for source in detached if (t := source()) is not None]
        found = [t for t in sources if memory is None or memory_of(t) == memory]
        if memory is None and found:
            raise hidden(name, "under torch.no_grad() or detached,")
    found = [t for t in found if not is_made_in_call(t)]
    wholes = [whole_of(t) for t in found]
    if any(t.is_leaf or not t.is_floating_point() for t in wholes):
        raise hidden(name, "under torch.no_grad() or detached,")
    return _recorded(wholes[0], found[0], name) if wholes else None


def is_made_in_call(tensor: Tensor) -> bool:
    """Whether it is the parameter of a layer that the call makes: no gradient goes on from there."""
    mode: Any = get_proxy_mode()
    if mode is None or not isinstance(tensor, torch.nn.Parameter):
        return False
    known = mode.tracer.tensor_tracker.get(whole_of(tensor))
    return known is not None and known.proxy.node.op == "call_function"


def _recorded(whole: Tensor, tensor: Tensor, name: str) -> Tensor:
    """What a tensor is a view of, or the tensor where that was made within a call: one that is all of it.

    Raises:
        CaptureError: it is a part.
    """
    mode: Any = get_proxy_mode()
    if mode is None or whole in mode.tracer.tensor_tracker:
        return whole
    if statically_known_true(tensor.numel() == whole.numel()):
        return tensor
    raise hidden(name, "a part of a result, under torch.no_grad() or detached,")


def write(target: Tensor, change: Callable[[], Any]) -> Any:
    """What a change gives; the gradient of what is changed stays what it is: 1 for each element (0 where not finite).

    Args:
        target: the tensor.
        change: changes it, or what is in the same memory.
    """
    with torch.enable_grad():
        finite = torch.where(torch.isfinite(target), target, 0.0)
        nothing = finite - finite.detach()
    made = change()
    with torch.enable_grad():
        target.copy_(target.detach() + nothing)
    return made


def replace_data(tensor: Tensor, content: Tensor, detached: Sequence[weakref.ref[Tensor]]) -> None:
    """Give a tensor another content, as ``tensor.data = content`` does.

    Args:
        tensor: the tensor.
        content: of the same sizes and type.
        detached: the tensors that were detached, or what they are views of.

    Raises:
        CaptureError: the content has another form, or who shares the tensor's memory would see it too.
    """
    if (tensor.shape, tensor.dtype) != (content.shape, content.dtype):
        raise _refused_data("with a tensor of other sizes, or of another type")
    with torch.no_grad():
        behind = changed_behind(tensor, detached, "an assignment to .data")
        if whole_of(tensor) is not tensor or (behind is not None and behind is not tensor):
            raise _refused_data("of a view, which no longer is one then")
        content = content.detach().clone()
        if behind is None:
            tensor.copy_(content)
        else:
            write(tensor, lambda: tensor.copy_(content))


def _refused_data(how: str) -> CaptureError:
    return CaptureError(
        f"the forward pass replaces the data {how}",
        cure="compute a new tensor and use that, or change the data outside of forward",
    )


def whole_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; itself where it is none."""
    return tensor if tensor._base is None else tensor._base


def history(tensor: Tensor) -> tuple[int, Any]:
    """How often a tensor was changed, and what autograd knows of it; of a view, of what it is a view of."""
    return tensor._version, whole_of(tensor).grad_fn


def is_unnoticed(changed: Tensor, before: tuple[int, Any]) -> bool:
    """Whether autograd goes on as before about a tensor that has changed, as it does after ``logical_not_``."""
    now = history(changed)
    return changed.requires_grad and now[0] != before[0] and now[1] is before[1]


def hidden(name: str, how: str) -> CaptureError:
    """The error of a change that is refused."""
    return CaptureError(
        f"{name} changes a tensor, {how} whose gradient eager PyTorch passes on as if nothing had happened",
        cure="write y = x + (changed - x).detach() with a changed copy of x, or change parameters outside of forward",
    )
