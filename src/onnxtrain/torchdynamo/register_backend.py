"""Backends under the names of the predecessor: ``torch.compile(module, backend=aot_ort)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.torchdynamo.ort_backend import OrtBackend, OrtBackendOptions

DEFAULT_BACKEND = OrtBackend()


def ort(graph: torch.fx.GraphModule, examples: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """The backend as it is by default."""
    return DEFAULT_BACKEND(graph, examples)


def make_aot_ort(dynamic: bool = False) -> tuple[Callable[..., Any], OrtBackend]:
    """A compiler of its own for ``torch.compile``, and the backend that counts what it runs.

    Args:
        dynamic: whether one graph serves all sizes that Dynamo calls dynamic; else each combination has its own.
    """
    backend = OrtBackend(OrtBackendOptions(export_options={"dynamic_shapes": dynamic}))

    def compiler(graph: torch.fx.GraphModule, examples: Sequence[Any], **given: Any) -> Callable[..., Any]:
        return backend(graph, examples)

    compiler.__name__ = "dynamic_aot_ort" if dynamic else "aot_ort"
    return compiler, backend


aot_ort, DEFAULT_AOT_BACKEND = make_aot_ort()
dynamic_aot_ort, DEFAULT_DYNAMIC_BACKEND = make_aot_ort(dynamic=True)
