"""The reverse walk: one rule per node, broadcasting undone once, several consumers summed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.gradient.registry import Context, rule_of
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, TrainingGraph, describe, is_backward, source_of
from onnxtrain.ir.traits import Trait, traits_of

FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
FLOATING |= {ir.DataType.COMPLEX64, ir.DataType.COMPLEX128}

_ZERO = frozenset(("Floor", "Ceil", "Round", "Sign"))


def build_gradient(graph: ForwardGraph, outputs: Sequence[str] | None = None) -> TrainingGraph:
    """The training graph: forward nodes, then the nodes of the backward pass, in one model.

    Every floating output that depends on one of ``signature.differentiable`` gets a graph input
    ``{output}_grad`` to receive its gradient; every one of ``differentiable`` that an output depends on gets a
    graph output ``{name}_grad``.

    Args:
        graph: the forward pass; it is not changed.
        outputs: the outputs that will receive a gradient; None is all of them.

    Raises:
        GradientError: an operator on the way has no gradient rule.
    """
    model = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version)
    walk = _Walk(model.graph, graph.signature.differentiable)
    output_gradients = walk.seed(graph.signature.outputs if outputs is None else outputs)
    with walk.op.arithmetic():
        for node in reversed(list(model.graph)):
            if not is_backward(node):
                walk.differentiate(node)
    return TrainingGraph(model, graph.signature, output_gradients, walk.finish())


def tracked_outputs(graph: ForwardGraph) -> tuple[str, ...]:
    """The outputs that torch would say require a gradient: those that depend on one of ``signature.differentiable``.

    Unlike ``build_gradient`` this follows operators whose gradient is zero (Floor, Sign): torch does.
    """
    wanted = set(graph.signature.differentiable)
    active = {v for v in graph.model.graph.inputs if v.name in wanted and v.dtype in FLOATING}
    for node in graph.model.graph:
        ends = _stops(node) and node.op_type not in _ZERO
        if not ends and any(v in active for v in node.inputs if v is not None):
            active.update(v for v in node.outputs if v.dtype in FLOATING)
    visible = set(graph.signature.outputs)
    return tuple(str(v.name) for v in graph.model.graph.outputs if v in active and v.name in visible)


def undifferentiable(graph: ForwardGraph) -> list[ir.Node]:
    """The nodes without a gradient rule, or whose rule does not cover their case, were everything trained."""
    model = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version)
    nodes = list(model.graph)
    walk = _Walk(model.graph, (*graph.signature.user_inputs, *graph.signature.parameters))
    visible = set(graph.signature.outputs)
    expected = {y for y in model.graph.outputs if y.name in visible and y in walk.active}
    found = []
    with walk.op.arithmetic():
        for node, original in reversed(list(zip(nodes, list(graph.model.graph), strict=True))):
            walk.contributions = {y: y for y in node.outputs if y in expected}  # any value of the right type
            if not walk.contributions or _stops(node):
                continue
            expected |= {x for x in node.inputs if x is not None and x in walk.active}
            try:
                walk.differentiate(node)
            except Exception:  # whatever a rule trips over, it does not cover this case
                found.append(original)
    return found


class _Walk:
    """State of one reverse walk: which values need a gradient, and the contributions found so far."""

    def __init__(self, graph: ir.Graph, differentiable: Sequence[str]) -> None:
        self.graph = graph
        self.op = Builder(graph, backward=True)
        wanted = set(differentiable)
        self.targets = [v for v in graph.inputs if v.name in wanted]
        self.active = _reachable(graph, self.targets)
        self.contributions: dict[ir.Value, ir.Value] = {}

    def seed(self, outputs: Sequence[str]) -> dict[str, str]:
        """Add a graph input for the gradient of each differentiable output."""
        by_name = {v.name: v for v in self.graph.outputs}
        seeds: dict[str, str] = {}
        for name in dict.fromkeys(outputs):
            output = by_name[name]
            if output in self.active:
                dy = ir.Value(name=f"{name}_grad", type=output.type, shape=output.shape)
                self.graph.inputs.append(dy)
                self.contribute(output, dy)
                seeds[name] = str(dy.name)
        return seeds

    def differentiate(self, node: ir.Node) -> None:
        """Call the node's rule and hand the gradients it returns to the node's inputs."""
        dys = [self.contributions.get(y) for y in node.outputs]
        wanted = [x is not None and x in self.active for x in node.inputs]
        if not any(wanted) or all(dy is None for dy in dys) or _stops(node):
            return
        rule = rule_of(node)
        if rule is None:
            raise _no_rule(node)
        self.op.metadata = dict(node.metadata_props)
        attributes = {name: a.value for name, a in node.attributes.items()}
        made = rule(Context(self.op, node, dys), dys[0], *node.inputs, **attributes)
        gradients = made if isinstance(made, tuple | list) else (made,)
        for index, x in enumerate(node.inputs):
            if x is not None and x in self.active:
                if index >= len(gradients):
                    raise _no_gradient(node, index)
                if gradients[index] is not None:
                    self.contribute(x, self.undo_broadcast(gradients[index], x))

    def contribute(self, value: ir.Value, dy: ir.Value) -> None:
        """Add one consumer's gradient to what the value has received so far."""
        before = self.contributions.get(value)
        self.contributions[value] = dy if before is None else self.op.Add(before, dy)

    def undo_broadcast(self, dx: ir.Value, x: ir.Value) -> ir.Value:
        """Sum a gradient over the axes along which its value was broadcast."""
        have, want = shapes.known_dims(dx), shapes.known_dims(x)
        if have == want:
            return dx
        lead = len(have) - len(want)
        pairs = list(zip(have[lead:], want, strict=True)) if lead >= 0 else [(None, None)]
        ones = [lead + i for i, (h, w) in enumerate(pairs) if h != w and w == 1]
        if lead < 0 or any(h != w and w != 1 for h, w in pairs):
            return self.op.SumToShape(dx, self.op.shape(x))
        if ones:
            dx = self.op.ReduceSum(dx, self.op.ints(*range(lead), *ones), keepdims=1)
            return self.op.Squeeze(dx, self.op.ints(*range(lead))) if lead else dx
        return self.op.ReduceSum(dx, self.op.ints(*range(lead)), keepdims=0)

    def finish(self) -> dict[str, str]:
        """Name the gradients of the targets and make them graph outputs."""
        gradients: dict[str, str] = {}
        taken = {*self.graph.inputs, *self.graph.outputs}
        for target in self.targets:
            dx = self.contributions.get(target)
            if dx is None:
                continue
            if dx in taken:
                dx = self.op.Identity(dx)
            taken.add(dx)
            dx.name = gradients[str(target.name)] = f"{target.name}_grad"
            self.graph.outputs.append(dx)
        return gradients


def _reachable(graph: ir.Graph, targets: Sequence[ir.Value]) -> set[ir.Value]:
    """Floating values that depend on a target through differentiable operators."""
    active = {v for v in targets if v.dtype in FLOATING}
    for node in graph:
        if not _stops(node) and any(v in active for v in node.inputs if v is not None):
            active.update(v for v in node.outputs if v.dtype in FLOATING)
    return active


def _stops(node: ir.Node) -> bool:
    return Trait.STOP in traits_of(node)


def _no_gradient(node: ir.Node, index: int) -> GradientError:
    value = node.inputs[index]
    return GradientError(
        f"{node.op_type} has no gradient for its input {index} ({value.name if value is not None else ''})",
        node=describe(node),
        source=source_of(node),
        cure="detach() that input if it is not trained",
    )


def _no_rule(node: ir.Node) -> GradientError:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return GradientError(
        f"no gradient rule for the operator {name}",
        node=describe(node),
        source=source_of(node),
        cure=f"register one with @onnxtrain.gradient.gradient({node.op_type!r}), or detach() the value if not trained",
    )
