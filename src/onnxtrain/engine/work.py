"""How many floating point operations a step takes, and how many eager PyTorch would take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from onnxtrain.compiler import Compiled
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.layer_slices import weights
from onnxtrain.ir.layers import NotRepeatedError, short_names
from onnxtrain.plan.cost import Flops, flops, training_flops

_SAME = 0.015  # by which counts may differ that mean the same: a gradient's additions are counted or are not


def share_of(ours: int, eager: int) -> str:
    """The operations of a step as a share of eager PyTorch's, in words; with a memory budget some run twice."""
    share = ours / max(1, eager)
    return "as many as eager's" if abs(share - 1) < _SAME else f"{share:.0%} of eager's"


class Work:
    """The operations of the steps of a graph.

    Args:
        graph: its forward pass.
    """

    def __init__(self, graph: ForwardGraph) -> None:
        self._graph = graph
        self._known: dict[object, Flops] = {}

    def of(self, compiled: Compiled, sizes: Mapping[str, int]) -> tuple[int, int] | None:
        """The operations of a training step, and those of eager; None where content decides on sizes.

        Args:
            compiled: the step.
            sizes: of named dimensions.
        """
        plan, wanted = compiled.plan, compiled.plan.signature.differentiable
        assert plan.backward is not None
        nodes = itertools.chain(plan.forward.graph, plan.backward.graph)
        ours = self._count(id(compiled), lambda: flops(nodes))
        eager = self._count(wanted, lambda: self._eager(wanted))
        if not {*ours.symbols, *eager.symbols} <= {*sizes}:
            return None
        return ours.evaluate(sizes), eager.evaluate(sizes)

    def _eager(self, wanted: Sequence[str]) -> Flops:
        """The operations of eager PyTorch; each layer of those that are alike is counted once."""
        short = self._graph.short
        try:
            names = short_names(wanted, short.layers) if short is not None else wanted
        except NotRepeatedError:
            return training_flops(self._graph, wanted)
        graph = short or self._graph
        return training_flops(graph, names, weights(graph.model.graph, graph.layers))

    def _count(self, key: object, count: Callable[[], Flops]) -> Flops:
        if key not in self._known:
            self._known[key] = count()
        return self._known[key]
