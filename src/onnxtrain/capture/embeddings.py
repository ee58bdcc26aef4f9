"""Embeddings that shorten the rows that they look up (``max_norm``): torch changes their weight out of sight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_LOOKING_UP = (F.embedding, F.embedding_bag)
_SMALL = 1e-7  # what torch adds to a norm that it divides by


def shortened(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]] | None:
    """The weight of a call that shortens rows, what it becomes, and the arguments without ``max_norm``; None of others.

    A row that is looked up and has a norm beyond ``max_norm`` is multiplied by ``max_norm / (norm + 1e-7)``
    (``torch.embedding_renorm_``).

    Args:
        func: a function of torch.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if func not in _LOOKING_UP:
        return None
    given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
    if (most := given.pop("max_norm", None)) is None:
        return None
    with torch.no_grad():
        weight, places = given["weight"], given["input"].flatten()
        rows = weight.detach()[places]
        norms = torch.linalg.vector_norm(rows, given.pop("norm_type", 2.0), 1, keepdim=True)
        cut = torch.where(norms > most, rows * (most / (norms + _SMALL)), rows)
        return weight, weight.detach().index_put((places,), cut), given
