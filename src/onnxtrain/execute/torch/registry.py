"""The table of lowerings: ``@lowering("Softmax")`` says how the torch backend computes an operator."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import BackendError
from onnxtrain.ir.graphs import describe, source_of


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How one operator runs on torch.

    Args:
        function: called with the inputs positionally and the attributes by keyword.
        host: positions of inputs that arrive as Python numbers (rank 0) or tuples of them (rank 1).
        view: the result may share memory with the first input.
        inplace: the same operator writing its result into its first input, or None.
        wants: which of ``EXTRAS`` the function takes beside the node's attributes.
        scalars: positions of inputs that arrive as a Python number where they are one that is known before.
    """

    function: Callable[..., Any]
    host: frozenset[int]
    view: bool
    inplace: Callable[..., Any] | None
    wants: frozenset[str]
    scalars: frozenset[int] = frozenset()


# Number of the node's outputs; which of them are read; which only the caller reads; where the node runs; ONNX type code
# of its first output; the call of a PythonOp; of a gradient that the caller receives, the tensor that he would add it
# to, or None: a lowering that adds to it returns it.
# A list that an operator may fill for its gradient, which takes out of it; None where the operator runs again.
EXTRAS = ("outputs", "needed", "final", "device", "dtype", "call", "into", "kept")
LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowering(
    *op_types: str,
    domain: str = "",
    host: Sequence[int] = (),
    scalars: Sequence[int] = (),
    view: bool = False,
    inplace: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how one or more operators run on torch; registering twice is an error.

    The function gets tensors (None for a missing input), and Python numbers for the inputs at ``host`` positions: axes,
    shapes, ratios. What of these is not known before is read from the device, which is waited for; ``scalars`` are
    numbers where they are known and tensors elsewhere. Attributes are keyword-only with ONNX's defaults. The function
    returns a tensor, or a tuple with one entry for each output of the node. ``view`` must be stated wherever the result
    can share memory with the first input: the memory of a value is written again only where nothing else can see it.
    ``inplace`` is for commutative operators and those whose first operand has the result's shape.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        wants = frozenset(EXTRAS) & _keywords(function)
        for op_type in op_types:
            if (domain, op_type) in LOWERINGS:
                raise ValueError(f"the lowering of {op_type} is registered twice")
            LOWERINGS[domain, op_type] = Lowering(function, frozenset(host), view, inplace, wants, frozenset(scalars))
        return function

    return register


def lowering_of(node: ir.Node) -> Lowering | None:
    """How a node's operator runs, or None."""
    from onnxtrain.execute.torch import lowerings  # noqa: F401  (fills LOWERINGS)

    return LOWERINGS.get((node.domain, node.op_type))


def needed_lowering(node: ir.Node) -> Lowering:
    """How a node's operator runs.

    Raises:
        BackendError: it does not.
    """
    found = lowering_of(node)
    if found is None:
        raise BackendError(
            f"the torch backend has no lowering for {node.op_type}",
            node=describe(node),
            source=source_of(node),
            cure=f"register one with @onnxtrain.execute.torch.registry.lowering({node.op_type!r})",
        )
    return found


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin of torch without a signature
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
