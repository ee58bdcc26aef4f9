"""What a call that has no translation is made of: simpler calls, recorded once more, of this one call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from onnxtrain.capture.lowering.writer import Writer, values

_LOG = logging.getLogger(__name__)


def expansion(
    writer: Writer, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[GraphModule, list[Any]] | None:
    """The calls that a call is made of, and what their inputs are; None where torch does not say, or its formula fails.

    Args:
        writer: of the graph that the call is to be in.
        target: the operator.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    formula = formula_of(target)
    if formula is None:
        return None
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]

    def run(*given: Any) -> Any:
        whole = list(leaves)
        for place, value in zip(places, given, strict=True):
            whole[place] = value
        positional, named = pytree.tree_unflatten(whole, structure)
        made = formula(*positional, **named)
        return list(made) if isinstance(made, tuple) else made  # torch's tuples have names

    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [leaves[i] for i in places]
    try:
        with writer.symbolic():
            return make_fx(run, tracing_mode="real")(*values(inputs)), inputs
    except Exception as error:  # a formula that looks into tensors, or is not for these types
        _LOG.debug("%s cannot be taken apart: %s", target, error)
        return None


@functools.cache
def formula_of(target: Any) -> Callable[..., Any] | None:
    """How torch computes an operator by others; None where it does not say."""
    from torch._decomp import decomposition_table

    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target._can_decompose():
        return target.decompose
    return decomposition_table.get(target) or _exports().get(target)


@functools.cache
def _exports() -> dict[Any, Callable[..., Any]]:
    return dict(torch.export.default_decompositions().items())
