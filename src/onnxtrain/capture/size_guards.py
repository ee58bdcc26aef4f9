"""Conditions on input sizes under which a captured graph is what the module computes: the branches its code took."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import sympy
import torch

from onnxtrain.capture import substitutes
from onnxtrain.capture.source_lines import is_users
from onnxtrain.capture.symbolic_sizes import Axis


@dataclasses.dataclass(frozen=True)
class SizeGuards:
    """What the module's Python code asked of its input sizes, with the answers it got while it was traced.

    Args:
        conditions: relations between symbols, all true for the sizes of the capture.
        symbols: for each symbol, one input axis that has this size.
    """

    conditions: tuple[sympy.Basic, ...]
    symbols: tuple[tuple[sympy.Symbol, Axis], ...]

    def hold(self, sizes: Sequence[Sequence[int]]) -> bool:
        """Whether every branch goes the same way for inputs of these sizes."""
        values = {symbol: sympy.Integer(sizes[position][axis]) for symbol, (position, axis) in self.symbols}
        return all(condition.xreplace(values) != sympy.false for condition in self.conditions)


def size_guards(program: torch.export.ExportedProgram, not_one: Set[sympy.Expr] = frozenset()) -> SizeGuards:
    """The branches on sizes that the module's own code took while it was captured.

    Args:
        program: the captured program.
        not_one: sizes that were taken to be other than 1.
    """
    users = set(program.graph_signature.user_inputs)
    inputs = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in users]
    symbols: dict[sympy.Symbol, Axis] = {}
    environment = None
    for position, tensor in enumerate(inputs):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                symbols.setdefault(size.node.expr, (position, axis))
                environment = size.node.shape_env
    if environment is None:
        return SizeGuards((), ())
    asked = [environment.simplify(g.expr) for g in environment.guards if _is_users(g.sloc.framework_loc)]
    asked += [sympy.Ne(environment.simplify(size), 1) for size in sorted(not_one, key=str)]
    conditions = dict.fromkeys(c for c in asked if c.free_symbols and c.free_symbols <= set(symbols))
    needed = {s for condition in conditions for s in condition.free_symbols}
    return SizeGuards(tuple(conditions), tuple((s, axis) for s, axis in symbols.items() if s in needed))


def _is_users(location: object) -> bool:
    """Branches of torch's own (strides, broadcasting) choose between equal results; a substitute's are the user's."""
    filename = getattr(location, "filename", None)
    return filename is not None and (is_users(filename) or filename == substitutes.__file__)
