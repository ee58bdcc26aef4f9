"""A program while it is written: each statement is run at all sizes at once, and kept if all of them take it."""

from __future__ import annotations

import dataclasses
import math
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from fuzz.modules.program import HEAD, Argument

LARGEST, GREATEST, MOST_AXES = 1500, 1e4, 5  # elements, absolute value, axes of a value


class Unusable(Exception):
    """A statement that eager does not take at some size, or that makes what is no use."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a tensor: its shape at each size, and its type."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_trained: bool

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    def static(self, axis: int) -> int:
        """The size of an axis that is the same at all sizes."""
        sizes = {shape[axis] for shape in self.shapes if -len(shape) <= axis < len(shape)}
        if len(sizes) != 1 or self.rank == 0:
            raise Unusable("the axis has several sizes")
        return sizes.pop()


class Scenes:
    """The names of a program with their values, at each of its sizes.

    Args:
        arguments: of the program.
        sizes: batch and length.
        real: the floating type.
        seed: of the values.
    """

    def __init__(self, arguments: Sequence[Argument], sizes: Sequence[tuple[int, int]], real: str, seed: int) -> None:
        self.arguments, self.sizes, self.real, self.seed = arguments, sizes, real, seed
        self.initial: list[str] = []
        self.body: list[str] = []
        self.known: dict[str, Known] = {}
        self.numbers: list[str] = []
        self._begin()
        self._look()

    def try_statement(self, statement: str, initial: Sequence[str] = ()) -> None:
        """Add a statement, and what it needs in ``__init__``.

        Raises:
            Unusable: nothing was added.
        """
        before = (list(self.initial), list(self.body), dict(self.known), list(self.numbers))
        try:
            for line in initial:
                self.initial.append(line)
                self._run(line, seeded=True)
            self.body.append(statement)
            self._run(statement)
            self._look()
        except Exception as error:  # of any kind: eager's, about whatever was written
            self.initial, self.body, self.known, self.numbers = before
            self._begin()
            for line in self.initial:
                self._run(line, seeded=True)
            for line in self.body:
                self._run(line)
            raise Unusable(str(error)) from error

    def _begin(self) -> None:
        self._spaces = []
        for batch, length in self.sizes:
            space: dict[str, Any] = {"B": batch, "L": length}
            exec(HEAD.format(real=self.real), space)
            torch.manual_seed(self.seed)
            for argument in self.arguments:
                space[argument.name] = eval(argument.value, space)
            space["self"] = torch.nn.Module()
            self._spaces.append(space)

    def _run(self, statement: str, seeded: bool = False) -> None:
        """Run a statement at all sizes; what it draws is the same each time, also where it is run again."""
        code = compile(statement, "<statement>", "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for space in self._spaces:
                torch.manual_seed(zlib.crc32(statement.encode()))
                exec(code, space)
                if seeded:
                    space["self"].to(getattr(torch, self.real))

    def _look(self) -> None:
        """Read what the names hold now.

        Raises:
            Unusable: a value is too large or not finite, or eager cannot go backwards.
        """
        self.known, self.numbers = {}, []
        for name, value in self._spaces[0].items():
            values = [space.get(name) for space in self._spaces]
            if any(v is None for v in values):
                continue  # given at some sizes only
            if isinstance(value, torch.Tensor):
                self.known[name] = _known(values)
            elif isinstance(value, int) and not isinstance(value, bool) and name not in ("B", "L"):
                self.numbers.append(name)
        for space in self._spaces:
            _go_back(space)


def _known(values: list[Any]) -> Known:
    shapes = []
    for value in values:
        if not isinstance(value, torch.Tensor) or value.numel() > LARGEST or value.dim() > MOST_AXES:
            raise Unusable("too large, or something else at another size")
        if value.dim() != values[0].dim() or value.dtype != values[0].dtype or value.is_complex():
            raise Unusable("another kind of tensor at another size")
        if value.numel() and not value.detach().double().abs().max() < GREATEST:
            raise Unusable("not finite, or too great")
        shapes.append(tuple(value.shape))
    return Known(tuple(shapes), values[0].dtype, any(v.requires_grad for v in values))


def _go_back(space: dict[str, Any]) -> None:
    """Gradients of all that has any, which must be finite."""
    tensors = [v for v in space.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    leaves = [v for v in [*tensors, *space["self"].parameters()] if v.is_leaf and v.requires_grad]
    total = sum(v.double().sum() for v in tensors if not v.is_leaf)
    if not isinstance(total, torch.Tensor) or not leaves:
        return
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    if not all(g is None or math.isfinite(g.double().abs().sum()) for g in found):
        raise Unusable("a gradient is not finite")
