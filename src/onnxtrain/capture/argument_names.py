"""Names of arguments that torch takes beside its own: those of numpy, ``axis`` for ``dim``."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

_NUMPYS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType)  # torch's own code takes them, no Python function


def own_names(func: Callable[..., Any], takes: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The named arguments of a call of a function of torch, by the names that another function has for them.

    Args:
        func: the function of torch.
        takes: the other function.
        kwargs: the arguments.
    """
    if not isinstance(func, _BUILT_IN):
        return dict(kwargs)
    known = _parameters(takes)
    return {_NUMPYS[n] if n not in known and _NUMPYS.get(n) in known else n: v for n, v in kwargs.items()}


@functools.lru_cache(1024)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
