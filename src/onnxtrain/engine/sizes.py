"""The sizes of a call by the names that a graph has for them, and which of them are always the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import onnx_ir as ir
import sympy
import torch

from onnxtrain.ir import shapes

_Places: TypeAlias = dict[str, tuple[str, int]]  # sizes by name, each with an input and an axis that has it


class InputSizes:
    """Sizes of a graph's inputs, and which were the same in all calls: the batch of ids and of labels.

    torch.export knows sizes as the same only where the module would fail otherwise. Here those of one axis are taken to
    be the same as long as they are; what is planned with that holds for calls in which it is true.

    Args:
        graph: a graph.
        inputs: the names of those of its inputs that have sizes of their own.

    Attributes:
        same: for each size that was always the same as an earlier one, the name of that one.
    """

    def __init__(self, graph: ir.Graph, inputs: Collection[str]) -> None:
        self._places: _Places = {}
        for value in graph.inputs:
            for axis, dim in enumerate(shapes.dims_of(value) or ()):
                if value.name in inputs and isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    self._places.setdefault(dim.value, (str(value.name), axis))
        self._become([{n: p for n, p in self._places.items() if p[1] == axis} for axis in (0, 1)])

    def of(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The sizes of a call, in the order of the graph's inputs."""
        return {name: inputs[value].shape[axis] for name, (value, axis) in self._places.items()}

    def narrow(self, sizes: Mapping[str, int]) -> None:
        """No longer take those sizes to be the same that a call shows not to be."""
        split = [_by_size(c, sizes) for c in self._classes]
        if any(len(parts) > 1 for parts in split):
            self._become([part for parts in split for part in parts])

    def _become(self, classes: list[_Places]) -> None:
        self._classes = [c for c in classes if len(c) > 1]
        self.same = {name: next(iter(c)) for c in self._classes for name in list(c)[1:]}


def _by_size(places: _Places, sizes: Mapping[str, int]) -> list[_Places]:
    found: dict[int, _Places] = {}
    for name, place in places.items():
        found.setdefault(sizes[name], {})[name] = place
    return list(found.values())


def size_of(dim: shapes.Dim, sizes: Mapping[str, int]) -> int:
    """A dimension of a call."""
    if isinstance(dim, int):
        return dim
    if str(dim.value) in sizes:
        return sizes[str(dim.value)]
    names, function = _compiled(shapes.as_expression(dim))
    return int(function(*(sizes[name] for name in names)))


@functools.cache
def _compiled(expression: sympy.Expr) -> tuple[tuple[str, ...], Callable[..., float]]:
    symbols = sorted(expression.free_symbols, key=str)
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, "math")
