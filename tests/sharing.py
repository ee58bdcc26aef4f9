"""A watch over the torch backend: memory that an operator's result shares with an operand is stated where it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from onnxtrain.execute.torch import lowerings  # noqa: F401  (fills LOWERINGS)
from onnxtrain.execute.torch.memory import SHARE_ANY
from onnxtrain.execute.torch.registry import LOWERINGS, Lowering


def watch() -> None:
    """From now on an operator that gives away memory unseen raises an error: it would be overwritten."""
    for (domain, op_type), found in LOWERINGS.items():
        if op_type not in SHARE_ANY:
            LOWERINGS[domain, op_type] = dataclasses.replace(found, function=_watched(op_type, found))


def _watched(op_type: str, found: Lowering) -> Callable[..., Any]:
    @functools.wraps(found.function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        results = found.function(*args, **kwargs)
        given, made = set(_memories(args[int(found.view) :])), _memories(results)
        assert given.isdisjoint(made), f"{op_type} returns memory of an operand, which its lowering does not state"
        assert found.view or len(set(made)) == len(made), f"results of {op_type} share memory"
        return results

    return watched


def _memories(values: Any) -> list[int]:
    """Of tensors that hold something."""
    leaves = pytree.tree_leaves(values)
    return [t.untyped_storage().data_ptr() for t in leaves if isinstance(t, torch.Tensor) and _is_held(t)]


def _is_held(tensor: torch.Tensor) -> bool:
    has_memory = tensor.layout == torch.strided and tensor.numel() > 0 and not isinstance(tensor, FakeTensor)
    return has_memory and tensor.untyped_storage().data_ptr() != 0
