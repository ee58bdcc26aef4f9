"""Nodes that compute with sizes: they run on the host, so that nobody waits for a device to tell what they give."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.execute.torch.expressions import is_known
from onnxtrain.execute.torch.registry import Lowering
from onnxtrain.ir import shapes

_MOST = 64  # elements
_OF_SIZES = frozenset(("Shape", "Size"))
_NAMES = """
    Add Cast Ceil Concat Div Equal Expand Floor Gather Greater Identity Less Max Min Mod Mul Neg ReduceMax ReduceMin
    ReduceProd ReduceSum Reshape Round Slice Split Squeeze Sub Transpose Unsqueeze Where"""
_ARITHMETIC = frozenset(_NAMES.split())


def nodes_on_host(lowerings: Mapping[ir.Node, Lowering], results: Collection[ir.Value]) -> set[ir.Node]:
    """The nodes that compute numbers from sizes and constants, for operands that arrive as numbers alone.

    Args:
        lowerings: all nodes of a graph, and how they run.
        results: what the graph gives.
    """
    found = {node for node in lowerings if _is_arithmetic(node)}
    while wrong := [
        node for node in found if not (_has_numbers(node, found) and _is_read(node, found, lowerings, results))
    ]:
        found.difference_update(wrong)
    return found


def _is_arithmetic(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _ARITHMETIC | _OF_SIZES and all(map(_is_small, node.outputs))


def _is_small(value: ir.Value) -> bool:
    dims = shapes.dims_of(value)
    return dims is not None and all(isinstance(d, int) for d in dims) and math.prod(dims) <= _MOST  # type: ignore[arg-type]


def _has_numbers(node: ir.Node, found: Collection[ir.Node]) -> bool:
    """Whether all that it reads is known, or computed on the host."""
    return node.op_type in _OF_SIZES or all(
        v is None or v.producer() in found or is_known(shapes.data_of(v)) or shapes.constant_of(v) is not None
        for v in node.inputs
    )


def _is_read(
    node: ir.Node, found: Collection[ir.Node], lowerings: Mapping[ir.Node, Lowering], results: Collection[ir.Value]
) -> bool:
    """Whether what it gives is read as numbers, or on the host."""
    return not any(v in results for v in node.outputs) and all(
        reader in found or (reader in lowerings and index in lowerings[reader].host)
        for v in node.outputs
        for reader, index in v.uses()
    )
