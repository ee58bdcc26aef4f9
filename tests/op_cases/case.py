"""What a row of the table is, and how to write its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Given:
    """How to make one input: a shape and a range of real numbers, or of integers; or its content itself."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    integer: bool = False
    boolean: bool = False
    distinct: bool = False
    content: Any = None

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """A fresh array in double precision, int64 or bool."""
        if self.content is not None:
            return np.array(self.content, None if isinstance(self.content, np.ndarray) else np.float64)
        if self.boolean:
            return rng.random(self.shape) < 0.5
        if self.integer:
            return rng.integers(int(self.low), int(self.high), self.shape)
        if self.distinct:
            count = int(np.prod(self.shape))
            return (rng.permutation(count).reshape(self.shape) / count * (self.high - self.low) + self.low) + 0.01
        return rng.uniform(self.low, self.high, self.shape)


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
        opset: ONNX opset of the graph.
        cancels: how large the terms are that add up to what may be 0; their rounding errors are allowed.
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
    opset: int = 20
    cancels: float = 0.0

    @property
    def id(self) -> str:
        """The row's name in test output."""
        return f"{self.op}-{self.label}" if self.label else self.op


def x(*shape: int, low: float = -2.0, high: float = 2.0) -> Given:
    """Real numbers."""
    return Given(shape, low, high)


def at(*content: Any) -> Given:
    """These real numbers (or rows of them), such as the points where an operator has its kinks."""
    return Given(np.shape(content), content=content)


def exactly(content: np.ndarray) -> Given:
    """This array as an input, in its own type where that is not a real one."""
    return Given(content.shape, content=content)


def positive(*shape: int) -> Given:
    """Real numbers above 0."""
    return Given(shape, 0.3, 2.5)


def distinct(*shape: int) -> Given:
    """Real numbers of which no two are equal or near 0: for operators with kinks."""
    return Given(shape, -2.0, 2.0, distinct=True)


def index(*shape: int, high: int, low: int = 0) -> Given:
    """Integers."""
    return Given(shape, low, high, integer=True)


def flag(*shape: int) -> Given:
    """Bools."""
    return Given(shape, boolean=True)


def ints(*content: int) -> np.ndarray:
    """A constant int64 vector."""
    return np.array(content, np.int64)
