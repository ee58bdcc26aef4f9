"""What the attributes of a ``PythonOp`` node cannot hold: the class it calls and the objects it calls it with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN

PYTHON_OP = "PythonOp"
HANDLE = "handle"  # attribute that names the call until torch.onnx has made its graph; then the call is in Node.meta
CALL = "onnxtrain.call"  # key in Node.meta


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an argument comes from at run time: the index-th ``tensor`` or ``size``.

    A ``number`` is the content of the index-th tensor, which has no dimensions. A ``shape`` is made of
    ``length`` sizes.
    """

    kind: str
    index: int
    length: int = 0
    make: Any = None

    def of(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> Any:
        """What stands there."""
        if self.kind == "shape":
            return self.make(sizes[self.index : self.index + self.length])
        return (sizes if self.kind == "size" else tensors)[self.index]


@dataclasses.dataclass(frozen=True, eq=False)
class PythonCall:
    """One call of a subclass of ``torch.autograd.Function``, without its tensors.

    Lives as long as a node that calls it does; so do the objects among its arguments.

    Args:
        function: the class.
        name: its fully qualified name.
        leaves: the arguments, nested ones flattened: a ``Place`` for what differs from run to run, else the object.
        structure: how they nest; has ``unflatten(leaves)``.
        results: what is returned, flattened: ``Place("tensor", i)`` for a tensor, ``Place("size", i)`` for a size that
            differs from run to run, else the object.
        changed: positions of the tensors that the forward pass writes into.
        shown: those of them whose new content it does not return, and which follows what it returns.
        autocast: the device type and the element type of the autocast region around the call; None outside one.
        forward_reuse: for each output the tensor whose memory it is declared to reuse, or -1; None where nothing is.
        backward_reuse: for each tensor the output whose gradient's memory its own gradient reuses, in the same way.
    """

    function: Any
    name: str
    leaves: tuple[Any, ...]
    structure: Any
    results: tuple[Any, ...] = ()
    changed: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    autocast: tuple[str, Any] | None = None
    forward_reuse: tuple[int, ...] | None = None
    backward_reuse: tuple[int, ...] | None = None

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> Any:
        """The arguments with these tensors and sizes in their places."""
        leaves = [leaf.of(tensors, sizes) if isinstance(leaf, Place) else leaf for leaf in self.leaves]
        return self.structure.unflatten(leaves)


def is_call(node: ir.Node) -> bool:
    """Whether a node calls the forward pass of a ``torch.autograd.Function``."""
    return node.domain == DOMAIN and node.op_type == PYTHON_OP


def call_of(node: ir.Node) -> PythonCall:
    """The call of a ``PythonOp`` node."""
    return node.meta[CALL]
