"""Whether a captured graph serves a call's sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from onnxtrain.capture import Captured, is_trained_leaf
from onnxtrain.ir import shapes


def size_check(captured: Captured, module: torch.nn.Module) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A function that says whether the inputs of a call of a module fit a graph by their sizes.

    Constants are equal, each symbol is the same wherever it stands, none is 0 (of which torch takes no question), and
    every branch on a size goes the same way. What is changed in place is a leaf, or is none, as in the first call.
    """
    graph = captured.graph.model.graph
    constants: list[tuple[int, int, int]] = []
    symbols: dict[str, list[tuple[int, int]]] = {}
    expressions: list[tuple[int, int, shapes.Dim]] = []
    for position, value in enumerate(graph.inputs[: len(captured.graph.signature.user_inputs)]):
        for axis, dim in enumerate(shapes.known_dims(value)):
            if isinstance(dim, int):
                constants.append((position, axis, dim))
            elif dim.value is not None and dim.value.isidentifier():
                symbols.setdefault(dim.value, []).append((position, axis))
            else:
                expressions.append((position, axis, dim))
    groups = [places for places in symbols.values() if len(places) > 1]

    @functools.lru_cache(maxsize=4096)
    def hold(sizes: tuple[torch.Size, ...]) -> bool:
        if any(sizes[p][a] != size for p, a, size in constants):
            return False
        if any(sizes[first[0]][first[1]] == 0 for first, *_ in symbols.values()):
            return False
        for first, *others in groups:
            if any(sizes[p][a] != sizes[first[0]][first[1]] for p, a in others):
                return False
        if expressions and not _expressions_fit(sizes, symbols, expressions):
            return False
        return captured.guards.hold(sizes)

    def fits(tensors: Sequence[torch.Tensor]) -> bool:
        if any(is_trained_leaf(tensors[made.position]) != made.copied.is_leaf for made in captured.rewritten):
            return False
        return hold(tuple([t.shape for t in tensors])) and captured.guards.have_form(tensors, module)

    return fits


def _expressions_fit(
    sizes: Sequence[torch.Size],
    symbols: dict[str, list[tuple[int, int]]],
    expressions: list[tuple[int, int, shapes.Dim]],
) -> bool:
    known = {name: sizes[places[0][0]][places[0][1]] for name, places in symbols.items()}
    for position, axis, dim in expressions:
        assert not isinstance(dim, int), "numbers are compared as they are"
        if set(dim.free_symbols()) <= set(known) and _value(dim, known) != sizes[position][axis]:
            return False
    return True


def _value(dim: shapes.Dim, known: dict[str, int]) -> shapes.Dim | None:
    """A size for these others; None where it divides by one that is 0."""
    try:
        return dim if isinstance(dim, int) else dim.evaluate(known)
    except ZeroDivisionError:
        return None
