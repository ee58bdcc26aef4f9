"""The sizes of a call by the names that a graph has for them, and which of them are always the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir
import torch

from onnxtrain.errors import OptionError
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

    @property
    def names(self) -> Collection[str]:
        """The names of the sizes, in the order of the graph's inputs."""
        return self._places

    @property
    def leading(self) -> Collection[str]:
        """The names of the sizes of first axes: of batches."""
        return [name for name, (_, axis) in self._places.items() if axis == 0]

    def of(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The sizes of a call, in the order of the graph's inputs."""
        return {name: inputs[value].shape[axis] for name, (value, axis) in self._places.items()}

    def worst(self, stated: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes of a call whose inputs have stated shapes; those that were always the same as one of them are so.

        Args:
            stated: shapes of inputs by name.

        Raises:
            OptionError: there is no such input, or it has another number of axes.
        """
        ranks = {value: 0 for value, _ in self._places.values()}
        for value, axis in self._places.values():
            ranks[value] = max(ranks[value], axis + 1)
        for name, shape in stated.items():
            if name not in ranks:
                raise OptionError(f"worst_case: there is no input {name}", cure=f"name {', '.join(ranks)}")
            if len(shape) < ranks[name]:
                raise OptionError(f"worst_case: {name} has {ranks[name]} axes", cure="state the size of each")
        found = {n: stated[value][axis] for n, (value, axis) in self._places.items() if value in stated}
        for group in self._classes:
            known = [found[name] for name in group if name in found]
            found |= {name: max(known) for name in group if known and name not in found}
        return found

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
