"""Functions that autocast looks into: torch.export records them whole, and they are taken apart out of its sight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor
_CAST = (torch.float32, torch.float16, torch.bfloat16)  # not float64, as in torch


def _under_autocast(name: str, of_wider: Callable[..., Tensor] | None = None) -> None:
    """Do here what autocast does inside of a function that is taken apart later, out of its sight.

    Args:
        name: of a function of torch, and of a method of tensors.
        of_wider: the function written in others, for one that computes in the types it is given; else it is cast.
    """
    owners = (torch, F, torch.linalg, Tensor)
    for function in {getattr(owner, name): None for owner in owners if hasattr(owner, name)}:
        _cast_here(function, of_wider)


def _cast_here(function: Callable[..., Any], of_wider: Callable[..., Tensor] | None) -> None:
    @substitute(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        device = next((x.device.type for x in leaves if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return NotImplemented
        if of_wider is not None:
            return of_wider(*args, **kwargs) if device == "cpu" or function.__name__ != "mv" else NotImplemented
        wanted = torch.get_autocast_dtype(device)
        cast = [x.to(wanted) if isinstance(x, Tensor) and x.dtype in _CAST else x for x in leaves]
        given, named = pytree.tree_unflatten(cast, spec)
        return function(*given, **named)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made = (input1[..., None, :, None] * weight * input2[..., None, None, :]).sum((-2, -1))
    return made if bias is None else made + bias


for _name in ("einsum", "tensordot", "inner", "multi_dot", "chain_matmul"):
    _under_autocast(_name)
_under_autocast("dot", lambda input, tensor: (input * tensor).sum())
_under_autocast("vdot", lambda input, other: (input.conj() * other).sum())
_under_autocast("mv", lambda input, vec: (input * vec).sum(-1))
_under_autocast("bilinear", _bilinear)
