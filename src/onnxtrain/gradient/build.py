"""The reverse walk: one rule per node, broadcasting undone once, several consumers summed."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence

import onnx_ir as ir

from onnxtrain.errors import GradientError, OnnxTrainError, RuleError, first_line
from onnxtrain.gradient.flow import flowing, reachable, stops
from onnxtrain.gradient.registry import Context, rule_of
from onnxtrain.ir import functions, shapes
from onnxtrain.ir.bodies import bodies_of, remove_unread
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.expansions import can_expand, expand_nodes
from onnxtrain.ir.graphs import ForwardGraph, TrainingGraph, describe, free_name, is_backward, source_of, values
from onnxtrain.ir.layer_slices import Slices
from onnxtrain.ir.layers import COPIED, MODEL, Layers, NotRepeatedError
from onnxtrain.ir.opsets import raise_opset
from onnxtrain.ir.standard_form import write_out

_LOG = logging.getLogger(__name__)


def build_gradient(graph: ForwardGraph, outputs: Sequence[str] | None = None) -> TrainingGraph:
    """The training graph: forward nodes, then the nodes of the backward pass, in one model.

    Every floating output that depends on one of ``signature.differentiable`` gets a graph input
    ``{output}_grad`` to receive its gradient; every one of ``differentiable`` that an output depends on gets a
    graph output ``{name}_grad``. Names that the forward pass has already get a number: ``{name}_grad_1``.

    Args:
        graph: the forward pass, of opset 13 or later; it is not changed. Below opset 20 the training graph has 20.
        outputs: the outputs that will receive a gradient; None is all of them.

    Raises:
        GradientError: an operator on the way has no gradient rule.
        NotRepeatedError: of a short graph: what a layer computes is not told by its own.
        GraphError: the graph is older than opset 13.
    """
    model, walk = _start(graph)
    output_gradients = walk.seed(graph.signature.outputs if outputs is None else outputs)
    walk.run()
    for row in graph.layers:
        _check_chain(model.graph, row, walk)
    return TrainingGraph(model, graph.signature, output_gradients, walk.finish())


def _check_chain(graph: ir.Graph, row: Layers, walk: Walk) -> None:
    """Whether the gradient of what the third layer of a short graph is given is computed with what is its own.

    Raises:
        NotRepeatedError: it is not, so that nothing tells how often that is computed.
    """
    slices = Slices(graph, row)
    between = [v for n, label in slices.of_node.items() if label == MODEL and not is_backward(n) for v in n.outputs]
    for value in between:
        is_given = any(slices.of_node.get(use.node) == COPIED and not is_backward(use.node) for use in value.uses())
        dy = walk.contributions.get(value)
        if is_given and dy is not None and slices.of_value.get(dy) not in (MODEL, COPIED):  # or with what it is given
            raise NotRepeatedError(f"the gradient of {value.name} is not computed with what is its layer's own")


def _start(graph: ForwardGraph) -> tuple[ir.Model, Walk]:
    """A copy of the forward pass, and the walk over it."""
    model = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version)
    raise_opset(model.graph)
    model = expand_nodes(model, lambda node: rule_of(node) is not None)
    wanted = set(graph.signature.differentiable)
    targets = [v for v in model.graph.inputs if v.name in wanted]
    write_out_without_rule(model.graph, targets)
    return model, Walk(model.graph, targets)


def write_out_without_rule(graph: ir.Graph, targets: Sequence[ir.Value]) -> None:
    """Write out our operators on the way that have no rule, in place: those of a backward pass, differentiated again.

    Their bodies are standard operators, which have rules.
    """
    while True:
        active = reachable(graph, targets)
        found = [n for n in graph if functions.has_body(n) and rule_of(n) is None and not stops(n)]
        found = [n for n in found if any(x in active for x in flowing(n))]
        if not found:
            return
        for node in found:
            write_out(node)


def gradient_errors(graph: ForwardGraph, outputs: Sequence[str] | None = None) -> tuple[ir.Model, list[OnnxTrainError]]:
    """All errors that keep a graph from being differentiated, where ``build_gradient`` raises the first.

    Where a node has no gradient the walk goes on as if it had one.

    Args:
        graph: the forward pass; it is not changed.
        outputs: the outputs that will receive a gradient; None is all of them.

    Returns:
        The training graph as far as it could be built, to look at its operators and not to be run; and the errors.
    """
    model, walk = _start(graph)
    walk.seed(graph.signature.outputs if outputs is None else outputs)
    return model, [error for _, error in walk.failures()][::-1]


def differentiate_body(body: ir.Graph, wanted: Sequence[bool], seeded: Sequence[bool]) -> tuple[ir.Graph, list[bool]]:
    """The gradients of a closed body, as a closed body: the iteration or branch is run again and walked backwards.

    Args:
        body: a closed body; it is not changed.
        wanted: for each of its inputs, whether its gradient is asked for.
        seeded: for each of its outputs, whether it receives a gradient.

    Returns:
        A graph whose inputs are the body's and then one gradient for each seeded output, and whose outputs are the
        gradients asked for, zeros where nothing flows; and for each of the body's inputs whether one flows there.
    """
    graph = body.clone()
    targets = [v for v, asked in zip(graph.inputs, wanted, strict=True) if asked]
    write_out_without_rule(graph, targets)
    walk = Walk(graph, targets)
    for index, (output, has) in enumerate(zip(list(graph.outputs), seeded, strict=True)):
        if has:
            dy = ir.Value(name=f"{output.name}_grad{index}", type=output.type, shape=output.shape)
            graph.inputs.append(dy)
            if output in walk.active:
                walk.contribute(output, dy)
    walk.run()
    with walk.op.arithmetic():
        gradients = [walk.contributions.get(v) for v in targets]
        zeros = [walk.op.Expand(walk.op.like(0.0, v), walk.op.shape(v)) for v in targets]
    graph.outputs.clear()
    graph.outputs.extend(zero if dx is None else dx for dx, zero in zip(gradients, zeros, strict=True))
    remove_unread(graph)
    return graph, [v in targets and v in walk.contributions for v in graph.inputs[: len(wanted)]]


def undifferentiable(graph: ForwardGraph) -> list[ir.Node]:
    """The nodes without a gradient rule, or whose rule does not cover their case, were everything trained.

    Raises:
        RuleError: a rule has a fault.
    """
    model = ir.Model(graph.model.graph.clone(), ir_version=graph.model.ir_version)
    originals = dict(zip(model.graph, graph.model.graph, strict=True))
    trained = {*graph.signature.user_inputs, *graph.signature.parameters}
    inner = [v for n in model.graph if functions.is_inner_gradient(n) for v in n.inputs if v is not None]
    walk = Walk(model.graph, [*(v for v in model.graph.inputs if v.name in trained), *inner])
    walk.seed(graph.signature.outputs)
    for value in inner:
        walk.contribute(value, value)
    found = []
    for node, error in walk.failures(like_others=True):
        if isinstance(error, RuleError):
            raise error
        if not can_expand(node):
            _LOG.info("the gradient of %s is left to torch", describe(node), exc_info=error)
            found.append(originals[node])
    return found


class Walk:
    """State of one reverse walk: which values need a gradient, and the contributions found so far.

    Args:
        graph: what is differentiated.
        targets: the values whose gradients are wanted.
        before: a node of the forward pass that they are for: what is before it is walked over, and the backward pass
            written there, as part of the forward pass.
    """

    def __init__(self, graph: ir.Graph, targets: Sequence[ir.Value], before: ir.Node | None = None) -> None:
        self.graph = graph
        self.nodes = list(graph)
        if before is not None:
            self.nodes = self.nodes[: self.nodes.index(before)]
        self.op = Builder(graph, before=before, backward=before is None)
        self.targets = list(targets)
        self.names = {str(v.name) for v in values(graph)}
        self.active = reachable(graph, self.targets)
        self.contributions: dict[ir.Value, ir.Value] = {}
        self._alike: dict[Hashable, list[int]] = {}  # the inputs of a kind of node that a gradient reached

    def seed(self, outputs: Sequence[str]) -> dict[str, str]:
        """Add a graph input for the gradient of each differentiable output."""
        by_name = {v.name: v for v in self.graph.outputs}
        seeds: dict[str, str] = {}
        for name in dict.fromkeys(outputs):
            output = by_name[name]
            if output in self.active:
                dy = ir.Value(name=self.unused(f"{name}_grad"), type=output.type, shape=output.shape)
                self.graph.inputs.append(dy)
                self.contribute(output, dy)
                seeds[name] = str(dy.name)
        return seeds

    def unused(self, name: str) -> str:
        """The name, or with a number where a value of the forward pass has it: of a gradient, differentiated again."""
        unique = free_name(name, self.names)
        self.names.add(unique)
        return unique

    def run(self) -> None:
        """Differentiate all forward nodes, the last first."""
        with self.op.arithmetic():
            for node in reversed(self.nodes):
                if not is_backward(node):
                    self.differentiate(node)

    def failures(self, like_others: bool = False) -> list[tuple[ir.Node, OnnxTrainError]]:
        """Differentiate all forward nodes, the last first; those without a gradient, as if they had one, and why.

        Args:
            like_others: of nodes that are alike, as in the layers of a model, only one is differentiated.
        """
        found = []
        with self.op.arithmetic():
            for node in reversed([n for n in self.nodes if not is_backward(n)]):
                if functions.is_further(node):  # a gradient that flows there makes the graph whole
                    self.assume_gradients([0], node)
                    continue
                kind = self._kind(node) if like_others else None
                if kind in self._alike:
                    self.assume_gradients(self._alike[kind], node)
                    continue
                try:
                    self.differentiate(node)
                except OnnxTrainError as error:
                    found.append((node, error))
                    self.assume_gradients(range(len(node.inputs)), node)
                else:
                    if kind is not None:
                        self._alike[kind] = [i for i, x in enumerate(node.inputs) if x in self.contributions]
        return found

    def _kind(self, node: ir.Node) -> Hashable:
        """All that a rule of ours decides by whether there is a gradient; None where that is too much to compare."""
        rule = rule_of(node)
        if rule is None or not rule.__module__.startswith(f"{__package__}.") or bodies_of(node):
            return None
        attributes = tuple((name, str(a.value)) for name, a in sorted(node.attributes.items()))
        read = tuple(None if x is None else (*_form(x), x in self.active, _content(x)) for x in node.inputs)
        made = tuple((*_form(y), y in self.contributions) for y in node.outputs)
        return node.domain, node.op_type, attributes, read, made

    def differentiate(self, node: ir.Node) -> None:
        """Call the node's rule and hand the gradients it returns to the node's inputs.

        Raises:
            GradientError: the node has no gradient here.
            NotRepeatedError: it is of a layer that a short graph does not have.
            RuleError: its rule raised what is not an error of ours.
        """
        dys = [self.contributions.get(y) for y in node.outputs]
        wanted = [x in self.active for x in flowing(node)]
        if not any(wanted) or all(dy is None for dy in dys) or stops(node):
            return
        rule = rule_of(node)
        if functions.is_further(node):
            raise NotRepeatedError("a gradient flows through what a layer hands over")
        if rule is None:
            raise _no_rule(node)
        self.op.metadata = dict(node.metadata_props)
        attributes = {name: a.value for name, a in node.attributes.items()}
        try:
            made = rule(Context(self.op, node, dys, wanted), dys[0], *node.inputs, **attributes)
        except OnnxTrainError:
            raise
        except Exception as error:
            raise _fault(node, error) from error
        gradients = made if isinstance(made, tuple | list) else (made,)
        for index, x in enumerate(node.inputs):
            if wanted[index] and x is not None:
                if index >= len(gradients):
                    raise _no_gradient(node, index)
                if gradients[index] is not None:
                    self.contribute(x, self.undo_broadcast(gradients[index], x))

    def assume_gradients(self, places: Iterable[int], node: ir.Node) -> None:
        """Stand-ins for the gradients of a node's inputs in these places, where there are none."""
        inputs = flowing(node)
        for x in (inputs[place] for place in places):
            if x is not None and x in self.active and x not in self.contributions:
                self.contributions[x] = ir.Value(name=f"{x.name}_grad", type=x.type, shape=x.shape)

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
        if lead < 0:  # an operand of more axes than the result, all of size 1: the slopes of a PRelu
            return self.undo_broadcast(self.op.Unsqueeze(dx, self.op.ints(*range(-lead))), x)
        pairs = list(zip(have[lead:], want, strict=True))
        ones = [lead + i for i, (h, w) in enumerate(pairs) if h != w and w == 1]
        if any(h != w and w != 1 for h, w in pairs):
            return self.op.SumToShape(dx, self.op.shape(x))
        if ones:
            dx = self.op.ReduceSum(dx, self.op.ints(*range(lead), *ones), keepdims=1)
            return self.op.Squeeze(dx, self.op.ints(*range(lead))) if lead else dx
        return self.op.ReduceSum(dx, self.op.ints(*range(lead)), keepdims=0)

    def finish(self) -> dict[str, str]:
        """Name the gradients of the targets and make them graph outputs."""
        gradients: dict[str, str] = {}
        taken: set[ir.Value] = {*self.graph.inputs, *self.graph.outputs}
        for target in self.targets:
            dx = self.contributions.get(target)
            if dx is None:
                continue
            if dx in taken:
                dx = self.op.Identity(dx)
            taken.add(dx)
            dx.name = gradients[str(target.name)] = self.unused(f"{target.name}_grad")
            self.graph.outputs.append(dx)
        return gradients


def _form(value: ir.Value) -> tuple[Hashable, ...]:
    return value.dtype, shapes.dims_of(value)


def _content(value: ir.Value) -> Hashable:
    """What is known of what a value holds; of a large constant only that it is one."""
    constant = shapes.constant_of(value)
    if constant is None:
        return shapes.data_of(value)
    return constant.tobytes() if constant.size <= _SMALL else True


_SMALL = 64  # elements; no rule looks at each element of a larger constant


def _no_gradient(node: ir.Node, index: int) -> GradientError:
    value = node.inputs[index]
    return GradientError(
        f"{node.op_type} has no gradient for its input {index} ({value.name if value is not None else ''})",
        node=describe(node),
        source=source_of(node),
        cure="detach() that input if it is not trained",
    )


def _fault(node: ir.Node, error: Exception) -> RuleError:
    return RuleError(
        f"the gradient rule of {node.op_type} failed: {type(error).__name__}: {first_line(error)}",
        node=describe(node),
        source=source_of(node),
        cure="correct the rule; where it does not cover a case it says so with ctx.unsupported(...)",
    )


def _no_rule(node: ir.Node) -> GradientError:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return GradientError(
        f"no gradient rule for the operator {name}",
        node=describe(node),
        source=source_of(node),
        cure=f"register one with @onnxtrain.gradient.gradient({node.op_type!r}), or detach() the value if not trained",
    )
