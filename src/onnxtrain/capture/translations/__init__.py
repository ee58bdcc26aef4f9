"""How operators whose training meaning torch.onnx would lose, or spread over many nodes, become ONNX nodes.

The table maps ATen overloads to functions that record nodes; the package's modules fill it, by family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op

TRANSLATIONS: dict[Any, Callable[..., Any]] = {}


def translation(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how an operator becomes nodes; arguments are the operator's, tensors as graph values.

    Where the function returns NotImplemented, torch.onnx's own translation is taken.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            if target in TRANSLATIONS:
                raise ValueError(f"the translation of {target} is registered twice")
            TRANSLATIONS[target] = function
        return function

    return register


WHOLE: dict[Any, Callable[[torch.fx.Node], bool]] = {}
APART: set[Any] = set()  # those of them whose other calls are taken apart


def whole(*targets: Any, or_apart: bool = False) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Register for which calls of an operator torch.onnx's translation is not what torch computes.

    The function takes the traced call (``torch.fx.Node``); where it says True the call becomes an ATen node. Calls of
    an operator without a translation always do, unless the others are to be taken apart (``or_apart``).
    """

    def register(function: Callable[[torch.fx.Node], bool]) -> Callable[[torch.fx.Node], bool]:
        for target in targets:
            if target in WHOLE:
                raise ValueError(f"whether {target} stays whole is registered twice")
            WHOLE[target] = function
            APART.update((target,) if or_apart else ())
        return function

    return register


def stays_whole(node: torch.fx.Node) -> bool:
    """Whether a traced call is to become an ATen node although it has a translation."""
    asks = WHOLE.get(node.target)
    return asks is not None and asks(node)


def like(value: Any, x: Any) -> Any:
    """A number in the type of a value."""
    return op.CastLike(value, x) if isinstance(value, ir.Value) else typed(value, x.dtype)  # a size, or a number


def alike(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Operands of one type, of which one may be a number; and that whose type is known."""
    if not isinstance(x, ir.Value) or x.dtype is None:
        return like(x, y), y, y
    return x, y if isinstance(y, ir.Value) and y.dtype is not None else like(y, x), x


def typed(value: Any, dtype: Any) -> Any:
    """A number in a type."""
    if isinstance(value, ir.Value):
        return value if value.dtype == dtype else op.Cast(value, to=dtype)
    return op.Constant(value=ir.tensor(np.array(value, ir.DataType(dtype).numpy()), dtype=ir.DataType(dtype)))


def vector(sizes: Sequence[Any]) -> Any:
    """Sizes, of which some are computed, as one tensor."""
    if all(isinstance(size, int) for size in sizes):
        return op.Constant(value_ints=list(sizes))
    one = op.Constant(value_ints=[1])
    parts = [op.Constant(value_ints=[s]) if isinstance(s, int) else op.Reshape(s, one) for s in sizes]
    return op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]


def reduced(loss: Any, reduction: int) -> Any:
    """A loss as it is, or its mean or sum: as torch numbers them."""
    return (loss, op.ReduceMean(loss, keepdims=0), op.ReduceSum(loss, keepdims=0))[reduction]


def number(value: float) -> ir.Value:
    """A float32 constant."""
    return op.Constant(value_float=float(value))


for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
