"""The tensors that a graph is bound to, and what backends return as tensors of torch."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.errors import UnsupportedDataError


class Owned(abc.ABC):
    """The parameters and buffers of a graph, where they live."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Where they are."""

    @abc.abstractmethod
    def now(self) -> list[torch.Tensor]:
        """The parameters and the buffers that there are now, in the order of the graph's inputs."""

    @abc.abstractmethod
    def update(self, contents: Sequence[torch.Tensor]) -> None:
        """Write new content into the buffers that the graph updates, in the order of its outputs."""


class Given(Owned):
    """Those of a graph that is given all its inputs at every call: none.

    Args:
        device: where the graph runs.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    @property
    def device(self) -> str:
        """Where the graph runs."""
        return self._device

    def now(self) -> list[torch.Tensor]:
        """None."""
        return []

    def update(self, contents: Sequence[torch.Tensor]) -> None:
        """There is nothing to write to."""


def as_torch(value: Any) -> torch.Tensor:
    """A backend's tensor as torch's, without copying."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__name__ == "ndarray" and value.dtype.name == "bfloat16":  # of ml_dtypes, which DLPack has not
        return torch.from_numpy(value.view("int16")).view(torch.bfloat16)
    if hasattr(value, "__dlpack__"):
        made = torch.from_dlpack(value)
        is_bool = hasattr(value, "data_type") and value.data_type() == "tensor(bool)"
        return made.view(torch.bool) if is_bool else made
    raise UnsupportedDataError(f"the backend returned a {type(value).__name__}")
