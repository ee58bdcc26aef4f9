"""The tensors that a graph is bound to, and what backends return as tensors of torch."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.autograd.graph import get_gradient_edge

from onnxtrain.errors import UnsupportedDataError
from onnxtrain.ir.shards import Gathering, Shards, gathering_of


class Owned(abc.ABC):
    """The parameters and buffers of a graph, where they live.

    Attributes:
        shards: gathers those that are in shards; None where all are whole.
    """

    shards: Shards | None = None

    def gathering(self, graph: ir.Graph) -> Gathering | None:
        """How those in shards are gathered for a graph, which all processes have; None where all are whole."""
        return None if self.shards is None else gathering_of(graph, self.shards)

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
        shards: gathers those of its inputs that are in shards.
    """

    def __init__(self, device: str, shards: Shards | None = None) -> None:
        self._device, self.shards = device, shards

    @property
    def device(self) -> str:
        """Where the graph runs."""
        return self._device

    def now(self) -> list[torch.Tensor]:
        """None."""
        return []

    def update(self, contents: Sequence[torch.Tensor]) -> None:
        """There is nothing to write to."""


def memories(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Where tensors lie: numbers that views of the same memory share, while it is there."""
    return frozenset(x.untyped_storage()._cdata for x in tensors)


def accumulated(source: torch.Tensor, read: frozenset[int]) -> torch.Tensor | None:
    """The gradient of a leaf to which autograd is about to add another one, where nobody else sees that; or None.

    Args:
        source: the leaf, within a backward pass.
        read: the ``memories`` of what the user gave the pass to read.
    """
    gradient = source.grad if source.is_leaf else None
    if gradient is None or gradient.layout != torch.strided or type(gradient) is not torch.Tensor:
        return None
    if source._backward_hooks or source._post_accumulate_grad_hooks or gradient.requires_grad:
        return None
    if (gradient.dtype, gradient.device, gradient.shape) != (source.dtype, source.device, source.shape):
        return None
    if not memories([gradient]).isdisjoint(read):
        return None
    try:
        is_added = torch._C._will_engine_execute_node(get_gradient_edge(source).node)
    except RuntimeError:  # autograd.grad returns it
        return None
    return gradient if is_added else None


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
