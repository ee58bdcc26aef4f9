"""What a row of the table is: an operator, how its inputs are made, and the same in torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Given:
    """How to make one input.

    Args:
        shape: its sizes; those above 1 are symbols of the graph.
        low: the smallest number.
        high: numbers are below it.
        kind: ``real``; ``distinct``, no two equal or near 0; ``ties``, few values, many equal, both ends included;
            ``special``, with NaN, infinities and 0; ``integer``; ``bool``.
        dtype: the element type of integers.
    """

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    kind: str = "real"
    dtype: str = "int64"

    @property
    def integer(self) -> bool:
        """Whether the input holds integers."""
        return self.kind == "integer"

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """A fresh array in double precision, in integers or bool."""
        return getattr(self, f"_{self.kind}")(rng)

    def _real(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.uniform(self.low, self.high, self.shape))

    def _bool(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.random(self.shape) < 0.5)

    def _integer(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.integers(int(self.low), int(self.high), self.shape)).astype(self.dtype)

    def _distinct(self, rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(self.shape))
        return (rng.permutation(count).reshape(self.shape) / count * (self.high - self.low) + self.low) + 0.01

    def _ties(self, rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(self.shape))
        levels = np.resize(np.linspace(self.low, self.high, 5), count)
        return rng.permutation(levels).reshape(self.shape)

    def _special(self, rng: np.random.Generator) -> np.ndarray:
        array = self._real(rng).reshape(-1)
        array[:4] = [np.nan, np.inf, -np.inf, 0.0]
        return rng.permutation(array).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    Args:
        op: the operator.
        inputs: how to make each input; an array is a constant of the graph, None a missing input.
        reference: the same in torch, on the inputs that are not constants; returns a tensor or a tuple.
        attributes: the node's attributes.
        domain: the operator's domain.
        outputs: how many outputs the node has.
        label: tells rows of one operator apart.
        static: inputs whose sizes are constants of the graph.
        frozen: inputs that get no gradient.
        differentiable: whether the gradient rule is checked.
        missing: the operator has no gradient rule yet; differentiating it must be an error.
        skips: backends that cannot run the row, each with the reason.
    """

    op: str
    inputs: tuple[Any, ...]
    reference: Callable[..., Any]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    label: str = ""
    static: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    differentiable: bool = True
    missing: bool = False
    skips: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> str:
        """The row's name in test output."""
        return f"{self.op}-{self.label}" if self.label else self.op


def x(*shape: int, low: float = -2.0, high: float = 2.0) -> Given:
    """Real numbers."""
    return Given(shape, low, high)


def positive(*shape: int) -> Given:
    """Real numbers above 0."""
    return Given(shape, 0.3, 2.5)


def distinct(*shape: int) -> Given:
    """Real numbers of which no two are equal or near 0: for operators with kinks."""
    return Given(shape, kind="distinct")


def ties(*shape: int, low: float = -2.0, high: float = 2.0) -> Given:
    """Five numbers from low to high, both included, each many times: the kinks themselves."""
    return Given(shape, low, high, kind="ties")


def special(*shape: int) -> Given:
    """Real numbers with NaN, infinities and 0 among them."""
    return Given(shape, kind="special")


def index(*shape: int, high: int, low: int = 0, dtype: str = "int64") -> Given:
    """Integers."""
    return Given(shape, low, high, kind="integer", dtype=dtype)


def flag(*shape: int) -> Given:
    """Bools."""
    return Given(shape, kind="bool")


def ints(*content: int) -> np.ndarray:
    """A constant int64 vector."""
    return np.array(content, np.int64)
