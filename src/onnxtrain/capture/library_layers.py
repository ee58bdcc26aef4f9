"""Layers of other libraries that a trace cannot see through, and what is recorded in their place."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer of a library.

    Args:
        module: where its class is.
        name: of the class.
        forward: what takes the place of its ``forward``.
        prepare: what is done to a layer before it is traced.
    """

    module: str
    name: str
    forward: Callable[..., Any]
    prepare: Callable[[Any], None]

    def kind(self) -> type[torch.nn.Module] | None:
        """The class; None where this process has not imported the library, or it has no such class."""
        return getattr(sys.modules.get(self.module), self.name, None)


_LAYERS: list[_Layer] = []


def forward_of(
    module: str, name: str, prepare: Callable[[Any], None] = lambda layer: None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what takes the place of the ``forward`` of a layer while a module is traced.

    Args:
        module: where the layer's class is.
        name: of the class.
        prepare: does to a layer what its own first call would, before it is traced.
    """

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        _LAYERS.append(_Layer(module, name, forward, prepare))
        return forward

    return register


def forwards() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Classes, the name of their method, and what takes its place: of the libraries that this process has imported."""
    return [(kind, "forward", layer.forward) for layer in _LAYERS if (kind := layer.kind()) is not None]


def prepare(module: torch.nn.Module) -> None:
    """Prepare the layers of a module that is about to be traced."""
    known = [(kind, layer) for layer in _LAYERS if (kind := layer.kind()) is not None]
    for part in module.modules() if known else ():
        for layer in (layer for kind, layer in known if isinstance(part, kind)):
            layer.prepare(part)
