"""Gradients of control flow: the body is run again, then walked backwards, in one body.

Of a branch only its operands are saved, of a loop also the states with which each iteration began. A value that the
body reads anew in every iteration receives the sum over all iterations; what a branch does not read gets zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.gradient.build import FLOATING, differentiate_body
from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes
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
    bodies = [differentiate_body(b, wanted, seeded) for b in (then_branch, else_branch)]
    given = [*operands, *(g for g in ctx.dys if g is not None)]
    _refuse_random(ctx, bodies)
    read = [any(_is_read(b, b.inputs[i]) for b in bodies) for i in range(len(given))]
    for body in bodies:
        _keep_inputs(body, read)
    made = ctx.op.node(
        "If",
        [condition, *(v for v, used in zip(given, read, strict=True) if used)],
        {"then_branch": bodies[0], "else_branch": bodies[1]},
        domain=DOMAIN,
        outputs=sum(wanted),
        like=[x for x, asked in zip(operands, wanted, strict=True) if asked],
    )
    found = iter(made.outputs)
    return (None, *(next(found) if asked else None for asked in wanted))


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
    return _iterate_back(ctx, body.clone(), body, list(body.inputs[:states]), operands, slices, made)


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
    numbers = _save_each(ctx, body, body.inputs[0])
    given = (*operands[:states], numbers, *operands[states:])
    gradients = _iterate_back(
        ctx, alone, body, list(body.inputs[2 : 2 + states]), given, [_Slices(numbers, 0, 1)], made, first=2
    )
    return (None, None, *gradients[:states], *gradients[states + 1 :])


class _Slices(NamedTuple):
    """A value of which each iteration reads a slice: along which axis, and 1 where from the last to the first."""

    value: Value | None
    axis: int
    direction: int


def _iterate_back(
    ctx: Context,
    alone: ir.Graph,
    body: ir.Graph,
    carried: Sequence[Value],
    operands: Sequence[Value],
    slices: Sequence[_Slices],
    stacked: Sequence[_Slices],
    first: int = 0,
) -> list[Value | None]:
    """One Scan that walks all iterations backwards.

    Args:
        ctx: of the forward node.
        alone: one iteration, a copy: states, slices and constants in, states and slices out.
        body: the forward node's body, which is made to give back the states that are saved.
        carried: its inputs that are states.
        operands: values of the initial states, of what is sliced, and of the constants.
        slices: how the backward iterations read what is sliced.
        stacked: gradients of the stacked outputs.
        first: position of the first state among the forward node's inputs, after which come the same operands but for
            the number of the iteration.

    Returns:
        A gradient for each operand.
    """
    op, states, last = ctx.op, len(carried), len(carried) + len(slices)
    floating = [v.dtype in FLOATING for v in alone.inputs[:states]]
    asked = list(ctx.wanted[first:]) if first == 0 else [*ctx.wanted[2 : 2 + states], False, *ctx.wanted[2 + states :]]
    wanted = [*floating, *asked[states:]]
    if ctx.node.op_type == "Loop":
        _refuse_changing(ctx, alone, states)
    back = differentiate_body(alone, wanted, [*floating, *(s.value is not None for s in stacked)])
    _refuse_random(ctx, [back])
    inputs, gradients = list(back.inputs), list(back.outputs)
    flows, results = sum(floating), iter(gradients)
    dstates = [next(results) for f in floating if f]
    dslices = [next(results) for w in wanted[states:last] if w]
    totals, sums = _accumulate(back, [*results])
    entries, parts, constants = inputs[:states], inputs[states:last], inputs[last : len(operands)]
    seeds, seen = inputs[len(operands) : len(operands) + flows], inputs[len(operands) + flows :]
    back.outputs.clear()
    back.outputs.extend([*dstates, *sums, *dslices])
    given = [s for s in stacked if s.value is not None]
    scanned: list[tuple[Value, _Slices]] = []
    for index, formal in enumerate(entries):
        if _is_read(back, formal):
            scanned.append((formal, _Slices(_save_each(ctx, body, carried[index]), 0, 1)))
    pairs = [*zip(parts, slices, strict=True), *zip(seen, given, strict=True)]
    scanned += [(f, s) for f, s in pairs if _is_read(back, f)]
    scanned = scanned or [(parts[0], slices[0])]
    read = [(f, v) for f, v in zip(constants, operands[last:], strict=True) if _is_read(back, f)]
    back.inputs.clear()
    back.inputs.extend([*seeds, *totals, *(f for f, _ in scanned), *(f for f, _ in read)])
    ends = [y for y, f in zip(ctx.node.outputs[:states], floating, strict=True) if f]
    dys = [g for g, f in zip(ctx.dys[:states], floating, strict=True) if f]
    summed = [v for v, w in zip(operands[last:], wanted[last:], strict=True) if w]
    sliced = [(v, s) for v, s, w in zip(operands[states:last], slices, wanted[states:last], strict=True) if w]
    attributes = {
        "body": back,
        "states": flows + len(totals),
        "num_scan_inputs": len(scanned),
        "scan_input_axes": [s.axis for _, s in scanned],
        "scan_input_directions": [s.direction for _, s in scanned],
    }
    if sliced:
        attributes["scan_output_axes"] = [s.axis for _, s in sliced]
        attributes["scan_output_directions"] = [s.direction for _, s in sliced]
    made = op.node(
        "Scan",
        [
            *(_zeros(op, y) if g is None else g for y, g in zip(ends, dys, strict=True)),
            *(_zeros(op, v) for v in summed),
            *(s.value for _, s in scanned),
            *(v for _, v in read),
        ],
        attributes,
        domain=DOMAIN,
        outputs=flows + len(totals) + len(sliced),
        like=[*ends, *summed, *(v for v, _ in sliced)],
    )
    found = iter(made.outputs)
    order = [i for i, f in enumerate(floating) if f]
    order += [i for i in range(last, len(operands)) if wanted[i]]
    order += [i for i in range(states, last) if wanted[i]]
    by_place = {i: next(found) for i in order}
    return [by_place.get(i) for i in range(len(operands))]


def _accumulate(graph: ir.Graph, gradients: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """For each gradient of a constant: the sum so far, an input, and the sum with this iteration's part."""
    op = Builder(graph, backward=True)
    before = [ir.Value(name=f"{g.name}_before{i}", type=g.type, shape=g.shape) for i, g in enumerate(gradients)]
    return before, [op.Add(b, g) for b, g in zip(before, gradients, strict=True)]


def _save_each(ctx: Context, body: ir.Graph, value: Value) -> Value:
    """Let the forward loop give back, stacked, what an input of its body was in each iteration."""
    node = ctx.node
    body.outputs.append(Builder(body).Identity(value))
    node.resize_outputs(len(node.outputs) + 1)
    node.outputs[-1].name = f"{node.outputs[0].name}_each_{value.name}"
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), 0])
    shapes.infer(node)
    return node.outputs[-1]


def _zeros(op: Builder, like: Value) -> Value:
    return op.Expand(op.like(0.0, like), op.shape(like))


def _is_read(graph: ir.Graph, value: Value) -> bool:
    return bool(value.uses()) or value in set(graph.outputs)


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
