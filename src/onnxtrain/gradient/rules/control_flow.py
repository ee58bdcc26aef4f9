"""Gradients of control flow: the body is run again, then walked backwards, in one body.

Of a branch only its operands are saved, of a loop also the states with which each iteration began. A value that the
body reads anew in every iteration receives the sum over all iterations; what one branch does not read gets zeros
there, and what no gradient reaches in any gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.gradient.build import differentiate_body
from onnxtrain.gradient.flow import FLOATING
from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import remove_unread
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import is_backward
from onnxtrain.ir.traits import Trait, traits_of

Value = ir.Value


@gradient("If", domain=DOMAIN)
def if_(
    ctx: Context, dy: Value | None, condition: Value, *operands: Value, then_branch: ir.Graph, else_branch: ir.Graph
) -> Any:
    """The same branch walked backwards; zeros for what it does not read."""
    wanted = ctx.wanted[1:]
    seeded = [g is not None for g in ctx.dys]
    (one, flows), (other, also) = (differentiate_body(b, wanted, seeded) for b in (then_branch, else_branch))
    bodies, reached = [one, other], [a or b for a, b in zip(flows, also, strict=True)]
    given = [*operands, *(g for g in ctx.dys if g is not None)]
    _refuse_random(ctx, bodies)
    for body in bodies:
        _keep_outputs(body, [r for r, asked in zip(reached, wanted, strict=True) if asked])
    if not any(reached):
        return (None,) * len(ctx.node.inputs)
    read = [any(_is_read(b, b.inputs[i]) for b in bodies) for i in range(len(given))]
    for body in bodies:
        _keep_inputs(body, read)
    made = ctx.op.node(
        "If",
        [condition, *(v for v, used in zip(given, read, strict=True) if used)],
        {"then_branch": bodies[0], "else_branch": bodies[1]},
        domain=DOMAIN,
        outputs=sum(reached),
        like=[x for x, flows in zip(operands, reached, strict=True) if flows],
    )
    found = iter(made.outputs)
    return (None, *(next(found) if flows else None for flows in reached))


@gradient("Scan", domain=DOMAIN)
def scan(
    ctx: Context,
    dy: Value | None,
    *operands: Value,
    body: ir.Graph,
    states: int,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] = (),
    scan_input_directions: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (),
    scan_output_directions: Sequence[int] = (),
) -> Any:
    """A scan from the last iteration to the first: the states' gradients are carried, the slices' are stacked."""
    last = states + num_scan_inputs
    axes = list(scan_input_axes) or [0] * num_scan_inputs
    directions = list(scan_input_directions) or [0] * num_scan_inputs
    slices = [_Slices(v, a, 1 - d) for v, a, d in zip(operands[states:last], axes, directions, strict=True)]
    count = len(body.outputs) - states
    axes = list(scan_output_axes) or [0] * count
    directions = list(scan_output_directions) or [0] * count
    made = [_Slices(v, a, 1 - d) for v, a, d in zip(ctx.dys[states:], axes, directions, strict=True)]
    return _Backward(ctx, body.clone(), body.inputs[:states], operands, ctx.wanted, slices, made).gradients()


@gradient("Loop", domain=DOMAIN)
def loop(
    ctx: Context,
    dy: Value | None,
    count: Value | None,
    condition: Value | None,
    *operands: Value,
    body: ir.Graph,
    states: int,
) -> Any:
    """A scan over the iterations that ran, from the last to the first."""
    alone = body.clone()
    number, going = alone.inputs[0], alone.inputs[1]
    going.replace_all_uses_with(Builder(alone).constant(np.array(True)))
    carried, constants = list(alone.inputs[2 : 2 + states]), list(alone.inputs[2 + states :])
    alone.inputs.clear()
    alone.inputs.extend([*carried, number, *constants])
    alone.outputs.pop(0)
    made = [_Slices(g, 0, 1) for g in ctx.dys[states:]]
    _refuse_changing(ctx, alone, states)
    numbers = _save_each(ctx, body.inputs[0])
    given = (*operands[:states], numbers, *operands[states:])
    asked = [*ctx.wanted[2 : 2 + states], False, *ctx.wanted[2 + states :]]
    each = [_Slices(numbers, 0, 1)]
    gradients = _Backward(ctx, alone, body.inputs[2 : 2 + states], given, asked, each, made).gradients()
    return (None, None, *gradients[:states], *gradients[states + 1 :])


class _Slices(NamedTuple):
    """A value of which each iteration reads a slice: along which axis, and 1 where from the last to the first."""

    value: Value | None
    axis: int
    direction: int


class _Backward:
    """One Scan that walks all iterations of a forward loop backwards.

    Args:
        ctx: of the forward node.
        alone: one iteration, a copy: states, slices and constants in, states and slices out.
        carried: the states' inputs of the forward node's own body, which is made to give back those that are saved.
        operands: values of the initial states, of what is sliced, and of the constants.
        asked: for each operand, whether its gradient is wanted; it is given where one flows there.
        slices: how the backward iterations read what is sliced.
        stacked: gradients of the stacked outputs, and how they are read.
    """

    def __init__(
        self,
        ctx: Context,
        alone: ir.Graph,
        carried: Sequence[Value],
        operands: Sequence[Value],
        asked: Sequence[bool],
        slices: Sequence[_Slices],
        stacked: Sequence[_Slices],
    ) -> None:
        self.ctx, self.carried, self.operands, self.slices = ctx, carried, operands, slices
        self.stacked = [s for s in stacked if s.value is not None]
        self.states, self.last = len(carried), len(carried) + len(slices)
        self.floating = [v.dtype in FLOATING for v in alone.inputs[: self.states]]
        wanted = [*self.floating, *asked[self.states :]]
        seeded = [*self.floating, *(s.value is not None for s in stacked)]
        self.body, reached = differentiate_body(alone, wanted, seeded)
        self.wanted = [*self.floating, *reached[self.states :]]
        _refuse_random(ctx, [self.body])
        _keep_outputs(self.body, [kept for kept, asked in zip(self.wanted, wanted, strict=True) if asked])

    def gradients(self) -> list[Value | None]:
        """A gradient for each operand."""
        if not any(self.wanted):
            return [None] * len(self.operands)
        body, last, flows = self.body, self.last, sum(self.floating)
        inputs, results = list(body.inputs), list(body.outputs)
        seeds, seen = inputs[len(self.operands) :][:flows], inputs[len(self.operands) + flows :]
        count = flows + sum(self.wanted[self.states : last])
        totals, sums = _accumulate(body, results[count:])
        body.outputs.clear()
        body.outputs.extend([*results[:flows], *sums, *results[flows:count]])
        scanned = self._scanned(inputs, seen)
        pairs = zip(inputs[last : len(self.operands)], self.operands[last:], strict=True)
        constants = [(f, v) for f, v in pairs if _is_read(body, f)]
        body.inputs.clear()
        body.inputs.extend([*seeds, *totals, *(f for f, _ in scanned), *(f for f, _ in constants)])
        made = self._emit([s for _, s in scanned], [v for _, v in constants])
        places = [i for i, f in enumerate(self.floating) if f]
        places += [i for i in range(last, len(self.operands)) if self.wanted[i]]
        places += [i for i in range(self.states, last) if self.wanted[i]]
        found = dict(zip(places, made, strict=True))
        return [found.get(i) for i in range(len(self.operands))]

    def _scanned(self, inputs: Sequence[Value], seen: Sequence[Value]) -> list[tuple[Value, _Slices]]:
        """Which inputs of the body are slices, and of what: saved states, what was sliced, gradients of the stacked."""
        found = [
            (formal, _Slices(_save_each(self.ctx, own), 0, 1))
            for formal, own in zip(inputs, self.carried, strict=False)
            if _is_read(self.body, formal)
        ]
        parts = inputs[self.states : self.last]
        pairs = [*zip(parts, self.slices, strict=True), *zip(seen, self.stacked, strict=True)]
        found += [(f, s) for f, s in pairs if _is_read(self.body, f)]
        return found or [(parts[0], self.slices[0])]  # a Scan has something to go along

    def _emit(self, scanned: Sequence[_Slices], constants: Sequence[Value]) -> Sequence[Value]:
        """The node: gradients of states and sums for constants are carried, gradients of slices are stacked."""
        op, ctx, states, last = self.ctx.op, self.ctx, self.states, self.last
        ends = [(y, g) for y, g, f in zip(ctx.node.outputs, ctx.dys, self.floating, strict=False) if f]
        summed = [v for v, w in zip(self.operands[last:], self.wanted[last:], strict=True) if w]
        sliced = [s for s, w in zip(self.slices, self.wanted[states:last], strict=True) if w]
        like = [*(y for y, _ in ends), *summed, *(s.value for s in sliced if s.value is not None)]
        attributes = {
            "body": self.body,
            "states": len(ends) + len(summed),
            "num_scan_inputs": len(scanned),
            "scan_input_axes": [s.axis for s in scanned],
            "scan_input_directions": [s.direction for s in scanned],
            "scan_output_axes": [s.axis for s in sliced] or None,
            "scan_output_directions": [s.direction for s in sliced] or None,
        }
        initial = [*(_zeros(op, y) if g is None else g for y, g in ends), *(_zeros(op, v) for v in summed)]
        operands = [*initial, *(s.value for s in scanned), *constants]
        return op.node("Scan", operands, attributes, domain=DOMAIN, outputs=len(like), like=like).outputs


def _accumulate(graph: ir.Graph, gradients: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """For each gradient of a constant: the sum so far, an input, and the sum with this iteration's part."""
    op = Builder(graph, backward=True)
    before = [ir.Value(name=f"{g.name}_before{i}", type=g.type, shape=g.shape) for i, g in enumerate(gradients)]
    return before, [op.Add(b, g) for b, g in zip(before, gradients, strict=True)]


def _save_each(ctx: Context, value: Value) -> Value:
    """Let the forward loop give back, stacked, what an input of its body was in each iteration.

    It may do so already, where its gradient is differentiated again.
    """
    node, body = ctx.node, ctx.node.attributes["body"].as_graph()
    name = f"{node.outputs[0].name}_each_{value.name}"
    if (saved := next((v for v in node.outputs if v.name == name), None)) is not None:
        return saved
    body.outputs.append(Builder(body).Identity(value))
    node.resize_outputs(len(node.outputs) + 1)
    node.outputs[-1].name = name
    for along in ("scan_output_axes", "scan_output_directions"):
        if along in node.attributes:
            node.attributes[along] = ir.AttrInt64s(along, [*node.attributes[along].as_ints(), 0])
    shapes.infer(node)
    return node.outputs[-1]


def _zeros(op: Builder, like: Value) -> Value:
    return op.Expand(op.like(0.0, like), op.shape(like))


def _is_read(graph: ir.Graph, value: Value) -> bool:
    return bool(value.uses()) or value in set(graph.outputs)


def _keep_outputs(graph: ir.Graph, kept: Sequence[bool]) -> None:
    """Leave the others out, with what is computed for them alone."""
    outputs = [v for v, keep in zip(graph.outputs, kept, strict=True) if keep]
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    remove_unread(graph)


def _keep_inputs(graph: ir.Graph, kept: Sequence[bool]) -> None:
    inputs = [v for v, keep in zip(graph.inputs, kept, strict=True) if keep]
    graph.inputs.clear()
    graph.inputs.extend(inputs)


def _refuse_random(ctx: Context, bodies: Sequence[ir.Graph]) -> None:
    for node in (n for body in bodies for n in body):
        if not is_backward(node) and Trait.RANDOM in traits_of(node):
            raise ctx.unsupported(f"the gradient of {ctx.node.op_type} with {node.op_type}, which is random, in it")


def _refuse_changing(ctx: Context, alone: ir.Graph, states: int) -> None:
    for before, after in zip(alone.inputs[:states], alone.outputs[:states], strict=True):
        if before.dtype in FLOATING and shapes.dims_of(before) != shapes.dims_of(after):
            raise ctx.unsupported(f"the gradient of {ctx.node.op_type} with a state whose size changes ({before.name})")
