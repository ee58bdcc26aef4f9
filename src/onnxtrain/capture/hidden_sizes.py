"""Sizes that depend on content where no tensor has one alone: ``zeros(n + 1)`` of a number ``n`` that was read."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import sympy

from onnxtrain.ir import shapes


def show(values: Iterable[ir.Value]) -> None:
    """Tell such a size by the first that is made of it, in place: ``u0 + 1`` is ``zeros_dim0``, ``u0`` one less.

    Args:
        values: of a graph, in order.
    """
    shaped = [v for v in values if v.shape is not None]
    shown: dict[sympy.Basic, sympy.Expr] = {}
    plain = {as_one for v in shaped for d in shapes.known_dims(v) if (as_one := _expression(d)).is_Symbol}
    for value in shaped:
        for axis, dim in enumerate(shapes.known_dims(value)):
            made = _expression(dim).xreplace(shown)
            hidden = [s for s in made.free_symbols if s not in plain]
            if len(hidden) == 1 and (factor := made.diff(hidden[0])) != 0 and hidden[0] not in factor.free_symbols:
                size = shapes.as_expression(shapes.fresh_dim(value, axis))
                shown[hidden[0]] = sympy.expand((size - made.xreplace({hidden[0]: sympy.Integer(0)})) / factor)
                plain.add(size)
    for value in shaped if shown else ():
        value.shape = ir.Shape([_shown(d, shown) for d in shapes.known_dims(value)])


def _expression(dim: shapes.Dim) -> sympy.Expr:
    return sympy.Integer(0) if not isinstance(dim, int) and dim.value is None else shapes.as_expression(dim)


def _shown(dim: shapes.Dim, shown: dict[sympy.Basic, sympy.Expr]) -> shapes.Dim:
    made = _expression(dim)
    if not made.free_symbols & shown.keys():
        return dim
    return shapes.simplify(ir.SymbolicDim(sympy.expand(made.xreplace(shown))))
