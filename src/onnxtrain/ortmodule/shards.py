"""Modules inside of the captured one whose parameters are in shards, of FSDP2 or of DeepSpeed's ZeRO stage 3.

They gather a module's parameters when it is called, which a graph of the whole never does; so the graph's programs
gather them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.errors import ContentError
from onnxtrain.ortmodule.fsdp_shards import FsdpShards, fsdp_shards_of
from onnxtrain.ortmodule.zero_shards import (
    InShardsError,
    ZeroShards,
    discovery,
    no_discovery,
    plain_linear,
    zero_shards_of,
)


def shards_of(module: torch.nn.Module) -> FsdpShards | ZeroShards | None:
    """What gathers the parameters of modules inside of this one; None where none is sharded on its own."""
    return fsdp_shards_of(module) or zero_shards_of(module)


@contextlib.contextmanager
def whole(module: torch.nn.Module) -> Iterator[None]:
    """Within it the modules inside look as if nobody had sharded them, to be captured: nobody reads their content."""
    shards = shards_of(module)
    with plain_linear(), contextlib.nullcontext() if shards is None else shards.whole():
        yield


def in_eager(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call returns in eager PyTorch, in which sharded modules gather their parameters themselves."""
    with discovery():
        return module.forward(*args, **kwargs)


def unless_in_shards(module: torch.nn.Module, error: ContentError) -> ContentError:
    """What says that a module looks into tensors.

    Raises:
        InShardsError: DeepSpeed gathers the parameters of modules inside.
    """
    if zero_shards_of(module) is not None:
        raise InShardsError(module) from error
    return error


__all__ = ["discovery", "in_eager", "no_discovery", "shards_of", "unless_in_shards", "whole"]
