"""Arithmetic operations of nodes and graphs, as expressions over the names of dynamic dimensions.

The unit is one floating point operation; a multiply-add is two, as in torch's FlopCounterMode. Products (matrix
products, convolutions, attention, recurrent layers) are counted exactly, without the additions of a bias. All else is
counted by element: one operation for each element of an elementwise operator's output, or of any other operator's
first input, or the few that ``PER_ELEMENT`` states; views and moves of elements cost nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import sympy

from onnxtrain.errors import GraphError, ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import ForwardGraph, describe
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.plan.formulas import PRODUCTS, Count, Formula, as_dim, backward_count, count_of, node_flops

__all__ = ["Flops", "flops", "node_flops", "training_flops"]


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating point operations, by operator.

    Args:
        counts: expression for each operator; a gradient that has no node yet is counted with its operator.
        uncounted: nodes whose cost cannot be told from sizes: calls of Python and of ATen, unknown shapes and counts
            of iterations.
    """

    counts: Mapping[str, Count]
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> shapes.Dim:
        """All operations."""
        return as_dim(self._sum)

    @property
    def products(self) -> Flops:
        """Those of matrix products, convolutions, attention and recurrent layers alone."""
        return Flops({name: c for name, c in self.counts.items() if name in PRODUCTS}, self.uncounted)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the dimensions that ``evaluate`` needs, sorted."""
        return tuple(sorted(s.name for s in self._sum.free_symbols))

    def by_operator(self) -> dict[str, shapes.Dim]:
        """The operations of each operator that has any, by its name."""
        return {name: as_dim(count) for name, count in self.counts.items()}

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The number of operations for given sizes of the named dimensions; others may be given too.

        Raises:
            ShapeError: the size of a dimension is missing.
        """
        names, function = self._compiled
        try:
            return function(*[sizes[name] for name in names])
        except KeyError as error:
            raise ShapeError(
                f"the size of dimension {error.args[0]} is not given", cure=f"give {', '.join(names)}"
            ) from None

    @functools.cached_property
    def _sum(self) -> Count:
        return sympy.Add(*self.counts.values())

    @functools.cached_property
    def _compiled(self) -> tuple[tuple[str, ...], Callable[..., int]]:
        """Python code for the total; all divisions are of integers, rounded down, so that nothing is lost."""
        numerator, denominator = sympy.fraction(sympy.together(self._sum)) if _divides(self._sum) else (self._sum, 1)
        exact = _QUOTIENT(_integral(numerator), _integral(sympy.sympify(denominator)))
        symbols = sorted(self._sum.free_symbols, key=lambda s: s.name)
        space = {"quotient": operator.floordiv}
        return self.symbols, sympy.lambdify(symbols, exact, modules=[space, "math"], cse=True)


_QUOTIENT: Any = sympy.Function("quotient")


def _divides(count: Count) -> bool:
    """Whether there is a division outside of roundings."""
    return sympy.fraction(sympy.together(count.replace(sympy.floor, lambda e: sympy.Symbol("rounded"))))[1] != 1


def _integral(count: Count) -> Count:
    """Roundings of quotients as divisions of integers."""
    floors = count.replace(sympy.ceiling, lambda e: -sympy.floor(-e))
    return floors.replace(sympy.floor, lambda e: _QUOTIENT(*sympy.fraction(sympy.together(e))))


def flops(nodes: Iterable[ir.Node], weights: Mapping[ir.Node, int] = MappingProxyType({})) -> Flops:
    """The operations of a graph (which is iterable) or of some nodes; what cannot be counted is named in the result.

    Args:
        nodes: the nodes.
        weights: how often those count that count more than once.
    """
    return _collect(((node, count_of) for node in nodes), weights)


def training_flops(
    forward: ForwardGraph, differentiable: Iterable[str], weights: Mapping[ir.Node, int] = MappingProxyType({})
) -> Flops:
    """What eager PyTorch computes for forward and backward of a forward graph.

    The forward's operations, and in the backward, for each input of a product that needs a gradient, a product of the
    same size; the kernel of an attention node computes its scores again and all three gradients, attention that is
    written out as products does not. Any other node on the way costs in the backward what it costs in the forward.
    Nothing is skipped: padding and ignored labels are computed.

    Args:
        forward: the forward pass.
        differentiable: parameters and inputs whose gradient is wanted.
        weights: how often nodes count that count more than once.
    """
    nodes = list(forward.model.graph)
    active = _active(forward, nodes, set(differentiable))
    backward = functools.partial(backward_count, active=active)
    on_the_way = (n for n in nodes if any(v in active for v in n.outputs))
    return _collect([*((n, count_of) for n in nodes), *((n, backward) for n in on_the_way)], weights)


def _collect(parts: Iterable[tuple[ir.Node, Formula]], weights: Mapping[ir.Node, int] = MappingProxyType({})) -> Flops:
    found: dict[str, collections.Counter[Count]] = {}
    uncounted: dict[str, None] = {}
    for node, formula in parts:
        try:
            count = formula(node)
        except (GraphError, ShapeError):
            uncounted[describe(node)] = None
            continue
        if count != 0:
            found.setdefault(node.op_type, collections.Counter())[count] += weights.get(node, 1)
    sums = {name: sympy.Add(*(count * n for count, n in counts.items())) for name, counts in found.items()}
    return Flops(sums, tuple(uncounted))


def _active(forward: ForwardGraph, nodes: Sequence[ir.Node], wanted: set[str]) -> set[ir.Value]:
    """Values that receive a gradient: they depend on what is wanted, and an output depends on them."""
    depends = {v for v in forward.model.graph.inputs if v.name in wanted}
    flowing = [n for n in nodes if Trait.STOP not in traits_of(n)]
    for node in flowing:
        if any(v in depends for v in node.inputs):
            depends.update(v for v in node.outputs if _floating(v))
    visible = set(forward.signature.outputs)
    reached = {v for v in forward.model.graph.outputs if v.name in visible}
    for node in reversed(flowing):
        if any(v in reached for v in node.outputs):
            reached.update(v for v in node.inputs if v is not None)
    return depends & reached


def _floating(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point() or value.dtype.name.startswith("COMPLEX")
