"""The backend of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxtrain.options import Options
from onnxtrain.torchdynamo.piece import Piece, forget
from onnxtrain.torchdynamo.settings import settings


def onnxtrain(
    graph: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Piece:
    """Compile what Dynamo found: it is captured at its first call, and trained as one optimized graph.

    Args:
        graph: the graph.
        examples: what stands for its inputs.
        mode: ``torch.compile``'s.
        options: ``torch.compile``'s: fields of ``onnxtrain.Options`` by name.

    Raises:
        OptionError: an option or the mode is not known.
    """
    return Piece(graph, examples, settings(mode, options))


onnxtrain.reset = forget  # type: ignore[attr-defined]
