"""Our operators (domain ``onnxtrain``): each is an ONNX function whose body is standard operators.

A definition is an ordinary onnxscript function in one of this package's modules. It is converted when first
used (``ir.function_bodies``), and onnxscript imported then, so that reading the table costs nothing: ``op``, the
operators of ONNX, and ``own``, those of ours, are put where bodies find them. The body is the truth: a backend may
lower the operator to one kernel, and any ONNX runtime can run the body instead (``ir.standard_form``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.ir.bodies import CLOSED
from onnxtrain.ir.graphs import DOMAIN

VERSION = 1
op: Any = None
own: Any = None
OPAQUE = {"ATen", "ATenGrad", "PythonOp", "PythonOpGrad"}  # only the torch backend can run them: no body exists
GRADIENTS = "Gradients"  # outputs, their gradients, inputs to the inputs' gradients; in a graph until capture is done
FURTHER = "LayersFurther"  # in a short graph: what a value of a layer is so many layers further (``ir.unfolding``)
CARRYING = {"RNNGrad", "GRUGrad", "LSTMGrad"}  # each node carries a body of its own


@dataclasses.dataclass(frozen=True)
class Definition:
    """One operator of ours.

    Args:
        body: the Python function that onnxscript converts.
        like: for each output, the index of the input whose type and shape it has; None asks the body.
        optional: names of inputs that a node may leave out; the body reads 0 in their place.
    """

    body: Callable[..., Any]
    like: tuple[int, ...] | None
    optional: frozenset[str] = frozenset()


DEFINITIONS: dict[str, Definition] = {}


def function(
    *, like: Sequence[int] | None = None, optional: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operator under the Python function's name; registering twice is an error."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        if body.__name__ in DEFINITIONS:
            raise ValueError(f"the operator {body.__name__} is defined twice")
        DEFINITIONS[body.__name__] = Definition(body, None if like is None else tuple(like), frozenset(optional))
        return body

    return register


@functools.cache
def load() -> None:
    """Fill ``DEFINITIONS``."""
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")


def defines(op_type: str) -> bool:
    """Whether the operator is one of ours."""
    load()
    return (
        op_type in DEFINITIONS
        or op_type in OPAQUE
        or op_type in CLOSED
        or op_type in CARRYING
        or op_type in (GRADIENTS, FURTHER)
    )


def is_inner_gradient(node: ir.Node) -> bool:
    """Whether a node stands for a backward pass within the forward pass."""
    return node.domain == DOMAIN and node.op_type == GRADIENTS


def has_body(node: ir.Node) -> bool:
    """Whether a node is one of our operators that is a function of standard operators."""
    load()
    return node.domain == DOMAIN and node.op_type in DEFINITIONS


def is_further(node: ir.Node) -> bool:
    """Whether a node stands for what its input is some layers further."""
    return node.domain == DOMAIN and node.op_type == FURTHER
