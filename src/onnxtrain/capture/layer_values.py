"""What a layer is given and gives, while it is traced, as far as layers that are alike have it alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.keepers import is_keeper
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.readings import ambient
from onnxtrain.capture.stand_in_tensors import known_of


class Leaves:
    """The leaves of a value, and their structure."""

    def __init__(self, value: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten(value)
        self.versions = list(map(version_of, self.leaves))

    def shares_memory(self, others: Iterable[Any]) -> bool:
        """Whether a tensor among them is a view of another one, or of one of these others; one of these it may be."""
        others = list(others)
        own = [x for x in self.leaves if not any(x is y for y in others)]
        with torch._C.DisableTorchFunction():
            found = [m for m in map(memory_of, own) if m is not None]
            return len({*found}) < len(found) or not {*found}.isdisjoint(map(memory_of, others))


class Given(Leaves):
    """What a layer is given: its arguments, and torch's modes."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__((args, kwargs))
        self.ambient = ambient()

    def is_same(self, other: Given) -> bool:
        """Whether both are the same tensors and equal values."""
        are_same = self.spec == other.spec and self.versions == other.versions
        return are_same and all(map(is_same, self.leaves, other.leaves))


def place_of(argument: Any, results: Leaves) -> int | None:
    """Which of the results of a layer an argument is; None where it is none."""
    if not isinstance(argument, torch.Tensor):
        return None
    return next((i for i, made in enumerate(results.leaves) if made is argument), None)


def is_same(x: Any, y: Any) -> bool:
    """Whether two arguments are one tensor, or equal values."""
    is_one = isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) or is_keeper(x)
    return x is y if is_one else known_of(x) == known_of(y)


def version_of(value: Any) -> int:
    """How often a tensor was changed."""
    with torch._C.DisableTorchFunction():
        return value._version if isinstance(value, torch.Tensor) else 0
