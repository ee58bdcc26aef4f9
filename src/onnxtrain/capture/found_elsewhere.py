"""Parameters and buffers that code finds elsewhere than on their module: in a list, in a dictionary, in a closure.

While a module is traced, it has others under the same names, without content. Who has kept a tensor of the module in
another place goes on reading that one, and a graph would hold the content that it has now: a constant that is not
trained. So what the module has under its name is put in its place, and what is trained but is none of the module's is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onnxtrain.errors import CaptureError

Tensors = Mapping[str, torch.Tensor]


def owned_by(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name; those that have several names under each."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


class FoundElsewhere:
    """What a module has while it is traced in the place of the tensors that it had.

    Args:
        had: the parameters and buffers that the module had, by name.
        has: those that it has now.
    """

    def __init__(self, had: Tensors, has: Tensors) -> None:
        self._had = tuple(had.values())  # alive, so that no other tensor gets the identity of one
        self._now = {id(tensor): has[name] for name, tensor in had.items() if name in has}
        self._memories = {_memory(t): t for t in self._had if _is_in_memory(t)}

    def now(self, func: Callable[..., Any], values: Iterable[Any]) -> list[Any]:
        """The arguments of a function, with what the module has in the place of what it had.

        Raises:
            CaptureError: one of them has a gradient, and is none of the module's.
        """
        return [self._one(func, value) for value in values]

    def _one(self, func: Callable[..., Any], value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self.now(func, value))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or func.__name__ == "__get__":
            return value
        found = self._now.get(id(value))
        return self._part(value) if found is None else found

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory of one that the module had, in the memory of the one that it has; others as they are."""
        owner = self._memories.get(_memory(value)) if _is_in_memory(value) else None
        is_view = value._is_view() or not value.requires_grad
        if owner is None or not is_view or owner.dtype != value.dtype or id(owner) not in self._now:
            if value.requires_grad and torch.is_grad_enabled() and _is_in_memory(value):
                raise _is_none_of_its()
            return value
        whole = self._now[id(owner)] if value.requires_grad else self._now[id(owner)].detach()
        if (value.shape, value.stride(), value.storage_offset()) == (owner.shape, owner.stride(), owner.storage_offset()):
            return whole
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a place in memory tells: no wrapper of ``torch.func``, and not empty."""
    is_plain = not isinstance(tensor, FakeTensor) and tensor.layout == torch.strided and tensor.device.type != "meta"
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and tensor.numel() > 0


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_none_of_its() -> CaptureError:
    return CaptureError(
        "the forward pass reads a tensor that requires a gradient and is no parameter of the module: it would not be "
        "trained",
        cure="make it one, self.weight = torch.nn.Parameter(...), or give it to the call; where it is not to be "
        "trained, detach it",
    )
