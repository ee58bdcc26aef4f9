"""Sizes as symbols while a module is traced: none becomes a number by ``len``, none outgrows what sympy can handle.

This is the one module that replaces something of Python's own, ``len``, and only while the user's forward pass runs.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.overrides import TorchFunctionMode

Axis = tuple[int, int]  # position of an input tensor, and one of its axes
LARGEST = 24  # operations in one size: models that can be dynamic stay below 15; above, each view takes seconds


class OvergrownSizesError(Exception):
    """A size became an expression that sympy takes minutes to reason about.

    Attributes:
        axes: the input axes that the expression is made of.
    """

    def __init__(self, axes: frozenset[Axis]) -> None:
        super().__init__(f"the sizes of input axes {sorted(axes)} make expressions of more than {LARGEST} operations")
        self.axes = axes


@contextlib.contextmanager
def symbolic_sizes(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run a block of tracing with sizes kept as symbols.

    Args:
        tensors: the inputs, as torch.export passes them to the forward pass.

    Raises:
        OvergrownSizesError: an intermediate result has a size of more than ``LARGEST`` operations.
    """
    with _symbolic_len(), _Watch(tensors):
        yield


@contextlib.contextmanager
def _symbolic_len() -> Iterator[None]:
    """Make ``len(tensor)`` the symbol that ``tensor.shape[0]`` is: of ``__len__`` Python takes numbers only."""
    plain = builtins.len

    def symbolic(data: Any) -> Any:
        return data.shape[0] if isinstance(data, torch.Tensor) and data.dim() > 0 else plain(data)

    builtins.len = symbolic
    try:
        yield
    finally:
        builtins.len = plain


class _Watch(TorchFunctionMode):
    """Looks at the sizes of every result: what is counted depends on the module alone, never on the clock.

    Windows that are padded, shifted and clamped to the image (Swin) are the known case: after a few layers each view
    asks sympy to compare expressions of hundreds of operations.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._axes: dict[sympy.Basic, list[Axis]] = {}
        for position, tensor in enumerate(tensors):
            for axis, size in enumerate(tensor.shape):
                for symbol in _expression(size).free_symbols:
                    self._axes.setdefault(symbol, []).append((position, axis))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            for size in result.shape:
                self._check(size)
        return result

    def _check(self, size: int | torch.SymInt) -> None:
        """Each factor for itself, so that a batch size that only multiplies an overgrown size is not blamed.

        Raises:
            OvergrownSizesError: the size is too large an expression of the inputs' sizes.
        """
        for factor in sympy.Mul.make_args(_expression(size)):
            if factor.is_Atom or factor.count_ops() <= LARGEST:
                continue
            axes = frozenset(place for symbol in factor.free_symbols for place in self._axes.get(symbol, ()))
            if axes:
                raise OvergrownSizesError(axes)


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
