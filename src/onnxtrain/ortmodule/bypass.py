"""Training past the graph: a warning when parameters get gradients although the ORTModule was never called."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakValueDictionary, ref

import torch

_LOG = logging.getLogger(__name__)
_CALLED: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()  # ORTModules that ran


class BypassWatch:
    """Looks for gradients of an ORTModule's parameters until its first call; from then on nothing is left of it.

    Args:
        owner: the ORTModule; not kept alive.
    """

    def __init__(self, owner: torch.nn.Module) -> None:
        self._owner = ref(owner)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._received) for p in owner.parameters() if _can_be_watched(p)
        ]

    def end(self) -> None:
        """The ORTModule was called: its parameters are watched no longer."""
        if (owner := self._owner()) is not None:
            _CALLED[id(owner)] = owner
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _received(self, parameter: torch.Tensor) -> None:
        """A parameter has received a gradient."""
        owner: Any = self._owner()
        self._remove()
        if owner is None or owner.__dict__["_ort_fallback"].reason is not None or _is_of_one_called(parameter):
            return
        _LOG.warning(
            "%s is trained without its graph: its parameters receive gradients, and the ORTModule was never called; "
            "look for a forward that was assigned and does not call the former one, for calls of model.module(...), "
            "and for calls of submodules",
            type(owner.module).__name__,
        )


def _can_be_watched(parameter: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(parameter):
        return False
    return parameter.requires_grad and parameter.is_leaf and not parameter.is_inference()


def _is_of_one_called(parameter: torch.Tensor) -> bool:
    """Whether another ORTModule of the same module, or of one around it, has computed the gradient."""
    return any(p is parameter for owner in _CALLED.values() for p in owner.parameters())
