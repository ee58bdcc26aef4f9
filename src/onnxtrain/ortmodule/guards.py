"""Which calls a captured graph can serve: everything capture looked at, and nothing that it did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from onnxtrain.capture import Autocast, Captured, flatten
from onnxtrain.ir import shapes


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the module, flattened.

    Args:
        tensors: the input tensors in order.
        key: equal keys can share a capture if the sizes fit.
    """

    tensors: list[torch.Tensor]
    key: Hashable


class Inspector:
    """Reads of a module and a call what decides which graph serves it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._modules = list(module.modules())
        self._tables = [m._parameters for m in self._modules if m._parameters]
        self._device_type = next((p.device.type for p in module.parameters()), "cpu")

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten a call.

        Raises:
            UnsupportedDataError: an input has a type that a graph cannot take.
        """
        tensors, schema = flatten((args, dict(sorted(kwargs.items()))))
        return Call(tensors, (schema, self._inputs(tensors), self._state(), self._autocast()))

    def _inputs(self, tensors: Sequence[torch.Tensor]) -> Hashable:
        return tuple((t.dtype, t.dim(), t.device, t.requires_grad) for t in tensors)

    def _state(self) -> Hashable:
        modes = tuple([m.training for m in self._modules])
        parameters = [p for table in self._tables for p in table.values() if p is not None]
        return modes, tuple([(p.requires_grad, p.dtype, p.device) for p in parameters])

    def _autocast(self) -> Hashable:
        if not torch.is_autocast_enabled(self._device_type):
            return None
        return Autocast.current(self._device_type)


def size_check(captured: Captured) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A function that says whether sizes fit a graph.

    Constants are equal, each symbol is the same wherever it stands, and every branch on a size goes the same way.
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

    def fits(tensors: Sequence[torch.Tensor]) -> bool:
        sizes = [t.shape for t in tensors]
        if any(sizes[p][a] != size for p, a, size in constants):
            return False
        for first, *others in groups:
            if any(sizes[p][a] != sizes[first[0]][first[1]] for p, a in others):
                return False
        if expressions and not _expressions_fit(sizes, symbols, expressions):
            return False
        return captured.guards.hold(sizes)

    return fits


def _expressions_fit(
    sizes: Sequence[torch.Size],
    symbols: dict[str, list[tuple[int, int]]],
    expressions: list[tuple[int, int, shapes.Dim]],
) -> bool:
    known = {name: sizes[places[0][0]][places[0][1]] for name, places in symbols.items()}
    for position, axis, dim in expressions:
        if (
            not isinstance(dim, int)
            and set(dim.free_symbols()) <= set(known)
            and dim.evaluate(known) != sizes[position][axis]
        ):
            return False
    return True
