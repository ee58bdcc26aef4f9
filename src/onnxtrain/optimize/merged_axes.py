"""Axes that are merged only to be taken apart again stay apart, so that batch and tokens are told from each other."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import replace
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.optimize.rows.sets import Sizes

Value = ir.Value


class MergedAxesPass(ir.passes.InPlacePass):
    """Linear layers of flattened rows keep the axes that their result gets; heads leave the batch before they move.

    ``Reshape(Linear(x))`` that gives x's flat first axis several again is ``Linear(Reshape(x))``, and
    ``Reshape(Transpose(Reshape(x)))`` that splits what the first merged is ``Transpose(Reshape(x))``: torch's
    MultiheadAttention has both.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        graph, modified = model.graph, False
        sizes = Sizes(graph)
        for node in list(graph):
            if node.graph is not graph or node.op_type != "Reshape" or node.domain or not _is_known(node, sizes):
                continue
            modified |= _split_before(graph, node, sizes) or _unflatten_before(graph, node, sizes)
        return ir.passes.PassResult(model, modified)


def _is_known(node: ir.Node, sizes: Sizes) -> bool:
    dims = shapes.dims_of(node.outputs[0])
    return dims is not None and all(map(sizes.knows, dims))


def _above(value: Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes a value for a single reader."""
    node = None if value is None else value.producer()
    alone = value is not None and len(value.uses()) == 1 and not value.is_graph_output()
    return node if alone and node is not None and node.op_type == op_type and node.domain == domain else None


def _split_before(graph: ir.Graph, node: ir.Node, sizes: Sizes) -> bool:
    """Split the axes that were merged before a Transpose there already."""
    moved = _above(node.inputs[0], "Transpose")
    merged = None if moved is None else _above(moved.inputs[0], "Reshape")
    if moved is None or merged is None:
        return False
    groups = _groups(shapes.known_dims(moved.outputs[0]), shapes.known_dims(node.outputs[0]))
    order = shapes.attribute(moved, "perm")
    if groups is None or order is None or all(len(g) == 1 for g in groups):
        return False
    parts = [groups[order.index(axis)] for axis in range(len(order))]  # of each axis before it moves
    starts = [sum(map(len, parts[:axis])) for axis in range(len(parts))]
    op = Builder(graph, before=node)
    op.metadata = dict(node.metadata_props)
    split = op.Reshape(merged.inputs[0], sizes.vector(op, *(d for part in parts for d in part)), allowzero=1)
    perm = [starts[axis] + i for axis in order for i in range(len(parts[axis]))]
    replace(graph, node, [op.Transpose(split, perm=perm)])
    return True


def _groups(before: shapes.Dims, after: shapes.Dims) -> list[list[shapes.Dim]] | None:
    """For each axis the axes that a Reshape splits it into; None where it does something else."""
    found, rest = [], list(after)
    for dim in before:
        group: list[shapes.Dim] = []
        while rest and (not group or shapes.product(group) != dim):
            group.append(rest.pop(0))
        if shapes.product(group) != dim:
            return None
        found.append(group)
    return None if rest else found


def _unflatten_before(graph: ir.Graph, node: ir.Node, sizes: Sizes) -> bool:
    """Give rows their axes before a linear layer instead of after it."""
    made = node.inputs[0].producer() if node.inputs[0] is not None else None
    layer = _above(node.inputs[0], made.op_type, DOMAIN) if made is not None else None
    if layer is None or layer.op_type not in ("Linear", "LinearWithoutBias"):
        return False
    x, dims = layer.inputs[0], shapes.known_dims(node.outputs[0])
    if x is None or _above(x, "Reshape") is None or shapes.rank(x) != 2 or len(dims) < 3:
        return False
    width, last = shapes.known_dims(x)[1], shapes.known_dims(layer.outputs[0])[1]
    if dims[-1] != last or not isinstance(width, int):
        return False
    op = Builder(graph, before=node)
    op.metadata = dict(layer.metadata_props)
    apart = op.Reshape(x, sizes.vector(op, *dims[:-1], width), allowzero=1)
    replace(graph, node, [op.node(layer.op_type, [apart, *layer.inputs[1:]], domain=DOMAIN).outputs[0]])
    return True


__all__ = ["MergedAxesPass"]
