"""Compute order: what is selected of a value is selected before it is computed.

A classifier that reads the first token, or a head that reads the last one, computes its last layer for that token
alone: the selection moves towards the inputs through all that treats the tokens alike, attention's queries included,
whose keys and values stay whole. Numbers and gradients stay the same but for rounding. Dropout that a selection passes
draws a mask for what is left, and so other random numbers than eager PyTorch.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.traits import Trait, traits_of
from onnxtrain.optimize.compute_order import reshapes  # noqa: F401  (its rules, as those of attention, fill the table)
from onnxtrain.optimize.compute_order.demand import Demand, draws, find
from onnxtrain.optimize.compute_order.moving import Mover, can_come_first
from onnxtrain.optimize.compute_order.selections import slice_of

_ROUNDS = 8  # of selections that stop below other selections


class ComputeOrderPass(ir.passes.InPlacePass):
    """Move selections towards the inputs, as far as that saves work.

    Args:
        through_dropout: whether they may pass nodes that draw random numbers, which then draw fewer.

    Attributes:
        note: what the last call did.
    """

    def __init__(self, *, through_dropout: bool = True) -> None:
        super().__init__()
        self.through_dropout = through_dropout
        self.note = ""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        graph, ends = model.graph, set[ir.Node]()
        modified = _one_axis_each(graph)
        own, selections, nodes = set(graph), set[ir.Node](), set[ir.Node]()
        for _ in range(_ROUNDS):
            found = find(graph, ends, self._allowed)
            if not found.entries:
                break
            finished = found.finished()
            stuck = {e.node for e in finished if not can_come_first(graph, e, found)}
            waiting = set(found.entries) - {e.node for e in finished}
            ends |= stuck or {n for n in waiting if not _below_another(n, found)}
            if finished and not stuck:
                Mover(graph, found).run()
                selections |= {e.node for e in finished} & own
                nodes |= set(found.moves)
        self.note = f"selections moved: {len(selections)}, above {len(nodes)} nodes" if nodes else ""
        return ir.passes.PassResult(model, modified or bool(nodes))

    def _allowed(self, node: ir.Node) -> bool:
        return Trait.EFFECT not in traits_of(node) and (self.through_dropout or not draws(node))


def _below_another(node: ir.Node, found: Demand) -> bool:
    """Whether a selection is of another selection's result: it may go on once that one is known to stay."""
    data = node.inputs[0]
    return data is not None and data.producer() in found.entries


def _one_axis_each(graph: ir.Graph) -> bool:
    """Make a Slice of several axes a Slice of each: they may come to stand at different places."""
    modified = False
    for node in list(graph):
        found = slice_of(node) if node.op_type == "Slice" and node.domain == "" else None
        data = node.inputs[0] if node.inputs else None
        if found is None or data is None or len(found[0]) < 2 or data.producer() is None or shapes.data_of(data):
            continue
        op = Builder(graph, before=node)
        op.metadata = dict(node.metadata_props)
        *before, last = zip(*found, strict=True)
        for bounds in before:
            data = op.Slice(data, *(op.ints(b) for b in bounds))
        node.resize_inputs(5)
        for index, value in enumerate((data, *(op.ints(b) for b in last))):
            node.replace_input_with(index, value)
        modified = True
    return modified


__all__ = ["ComputeOrderPass"]
