"""The tensors of a module, by name and by identity."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.attribute_reads import attributes_of, owners_of

OWN = frozenset(torch.nn.Module().__dict__)  # the attributes of every module


def owned_by(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name; those that have several names under each."""
    return dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))


def tensors_held(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors that a module's parts hold, and the objects and collections that these hold, but for its own."""
    tables = [*map(attributes_of, owners_of(module))]
    held = [v for table in tables for n, v in table.items() if n not in OWN]
    return [t for value in held for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def names_of(module: torch.nn.Module) -> dict[int, str]:
    """The name of each parameter and buffer by its identity."""
    return {id(tensor): name for name, tensor in owned_by(module).items()}
