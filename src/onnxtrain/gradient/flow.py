"""Through which nodes a gradient flows, and so which values depend on which."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.gradient.registry import stopped_inputs
from onnxtrain.ir.functions import is_further
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.ir.layers import Layers, whole_names
from onnxtrain.ir.traits import Trait, traits_of

FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
FLOATING |= {ir.DataType.COMPLEX64, ir.DataType.COMPLEX128}
_ONLY_TYPE = {"CastLike": frozenset((1,))}  # inputs of which nothing but the element type is read
_TRACKED = {"BatchNormTraining": 1}  # how many outputs have a gradient; new running statistics have none
_ZERO = frozenset(("Floor", "Ceil", "Round", "Sign"))


def stops(node: ir.Node) -> bool:
    """Whether no gradient flows through a node."""
    return Trait.STOP in traits_of(node)


def reachable(graph: ir.Graph, targets: Sequence[ir.Value]) -> set[ir.Value]:
    """Floating values that depend on a target through differentiable operators."""
    active = {v for v in targets if v.dtype in FLOATING}
    for node in graph:
        if not stops(node) and any(v in active for v in flowing(node)):
            active.update(_tracked(node))
    return active


def _tracked(node: ir.Node) -> list[ir.Value]:
    """The outputs to which a gradient can come back."""
    return [v for v in node.outputs[: _TRACKED.get(node.op_type)] if v.dtype in FLOATING]


def flowing(node: ir.Node) -> list[ir.Value | None]:
    """The node's inputs, with None for those through which no gradient flows."""
    stopped = stopped_inputs(node) | _ONLY_TYPE.get(node.op_type, frozenset())
    return [None if i in stopped else x for i, x in enumerate(node.inputs)]


def tracked_outputs(graph: ForwardGraph) -> tuple[str, ...]:
    """The outputs that torch would say require a gradient: those that depend on one of ``signature.differentiable``.

    Unlike ``build_gradient`` this follows operators whose gradient is zero (Floor, Sign): torch does.
    """
    signature = graph.signature
    found, wanted = signature.origins, set(signature.differentiable)
    found = origins_of_outputs(graph) if found is None else found
    names = [str(v.name) for v in graph.model.graph.outputs]
    return tuple(n for n in names if n in signature.outputs and wanted & found.get(n, frozenset()))


def origins_of_outputs(graph: ForwardGraph) -> dict[str, frozenset[str]]:
    """For each output the floating inputs on which torch would say that its gradient depends.

    Of a short graph those of the whole one.
    """
    inputs = [v for v in graph.model.graph.inputs if v.dtype in FLOATING]
    found = {v: 1 << place for place, v in enumerate(inputs)}  # sets of inputs, as bits
    further: dict[ir.Value, frozenset[str]] = {}  # what values depend on through what is some layers further
    for node in graph.model.graph:
        if stops(node) and node.op_type not in _ZERO:
            continue
        read = [v for i, v in enumerate(node.inputs) if v is not None and i not in _ONLY_TYPE.get(node.op_type, ())]
        bits = functools.reduce(operator.or_, (found.get(v, 0) for v in read), 0)
        names = frozenset().union(*(further.get(v, ()) for v in read))
        if is_further(node):
            bits, names = 0, names | _further(node, _named(bits, inputs), graph.layers)
        for value in _tracked(node):
            if bits:
                found[value] = bits
            if names:
                further[value] = names
    outputs = [v for v in graph.model.graph.outputs if v.name in graph.signature.outputs]
    return {
        str(v.name): _whole(_named(found.get(v, 0), inputs), graph.layers) | further.get(v, frozenset())
        for v in outputs
    }


def _named(bits: int, inputs: Sequence[ir.Value]) -> frozenset[str]:
    return frozenset(str(v.name) for place, v in enumerate(inputs) if bits >> place & 1)


def _whole(names: frozenset[str], layers: Sequence[Layers]) -> frozenset[str]:
    """What depends on the third layer of a row depends on those that the graph does not have."""
    for row in layers:
        names = frozenset(whole_names(sorted(names), row))
    return names


def _further(node: ir.Node, names: frozenset[str], layers: Sequence[Layers]) -> frozenset[str]:
    """What a value depends on that is some layers further.

    Args:
        node: stands for it.
        names: what its input depends on in a short graph.
        layers: the graph's rows.
    """
    row = next(row for row in layers if row.prefix == node.attributes["prefix"].value)
    return _whole(row.further(names, node.attributes["by"].value), [other for other in layers if other is not row])
