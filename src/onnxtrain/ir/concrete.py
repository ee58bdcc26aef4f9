"""Sizes and bytes of values where the named dimensions are known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import onnx_ir as ir
import sympy

from onnxtrain.ir import shapes


def size_of(dim: shapes.Dim, sizes: Mapping[str, int]) -> int:
    """A dimension of a call.

    Args:
        dim: the dimension.
        sizes: the sizes of named dimensions.

    Raises:
        KeyError: one that it is made of is not among them.
    """
    if isinstance(dim, int):
        return dim
    if str(dim.value) in sizes:
        return sizes[str(dim.value)]
    names, function = _compiled(shapes.as_expression(dim))
    return int(function(*(sizes[name] for name in names)))


def bytes_of(value: ir.Value, sizes: Mapping[str, int]) -> int | None:
    """The bytes of a value's elements; None where content decides on its size, or its type is not known."""
    dims = shapes.dims_of(value)
    if dims is None or value.dtype is None or any(not isinstance(d, int) and d.value is None for d in dims):
        return None
    try:
        return math.ceil(math.prod(size_of(d, sizes) for d in dims) * value.dtype.itemsize)
    except KeyError:
        return None


def with_sizes(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """A copy of a model whose dimensions are numbers, but for those that content decides on.

    Args:
        model: its shapes are inferred.
        sizes: of the named dimensions of its inputs.

    Raises:
        ShapeError: the model does not take such inputs.
    """
    made = model.clone()
    for value in made.graph.inputs:
        value.shape = _sized(value, sizes)
    for node, known in zip(made.graph, model.graph, strict=True):
        for value in node.outputs:
            value.shape = None
            shapes.forget_data(value)
        shapes.infer(node)
        for value, stated in zip(node.outputs, known.outputs, strict=True):
            if not shapes.are_known(shapes.dims_of(value)) or any(not isinstance(d, int) for d in value.shape or ()):
                value.shape = _sized(stated, sizes)
    return made


def _sized(value: ir.Value, sizes: Mapping[str, int]) -> ir.Shape | None:
    """The shape of a value, in numbers where they are known."""
    dims = shapes.dims_of(value)
    return None if dims is None else ir.Shape([_number(d, sizes) for d in dims])


def _number(dim: shapes.Dim, sizes: Mapping[str, int]) -> shapes.Dim:
    try:
        return dim if not isinstance(dim, int) and dim.value is None else size_of(dim, sizes)
    except KeyError:
        return dim


@functools.cache
def _compiled(expression: sympy.Expr) -> tuple[tuple[str, ...], Callable[..., float]]:
    symbols = sorted(expression.free_symbols, key=str)
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, "math")
