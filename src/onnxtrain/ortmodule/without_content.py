"""Modules on torch's meta device, which have no content, as modules of which a step can be told."""

from __future__ import annotations

import copy

import torch


def has_content(module: torch.nn.Module) -> bool:
    """Whether no parameter or buffer is on the meta device."""
    return not any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def without_content(module: torch.nn.Module, device: str = "cpu") -> torch.nn.Module:
    """A copy of a module whose tensors are on a device; nobody writes to them, so they take no memory there.

    Args:
        module: on the meta device.
        device: where it is to be.
    """
    made: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
    return copy.deepcopy(module, dict(made))
