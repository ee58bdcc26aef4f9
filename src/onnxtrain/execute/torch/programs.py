"""The programs of a plan: its forward and its backward pass, with kernels where they are asked for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.execute.torch.codegen import Writer
from onnxtrain.execute.torch.expressions import sizes_of
from onnxtrain.execute.torch.gathering import gather
from onnxtrain.execute.torch.kept import kept_between
from onnxtrain.execute.torch.kernels import is_kernel, with_kernels
from onnxtrain.execute.torch.lowerings.recurrent import is_fused
from onnxtrain.execute.torch.memory import Groups, unshared
from onnxtrain.execute.torch.program import Program
from onnxtrain.execute.torch.registry import Lowering, lowering_of, needed_lowering
from onnxtrain.ir.expansions import expand_nodes
from onnxtrain.ir.graphs import Plan
from onnxtrain.ir.standard_form import write_out_nodes


def compile_plan(
    plan: Plan,
    device: str,
    added: Mapping[str, int],
    keeps: bool,
    kernels: Callable[[ir.Node], Lowering] | None = None,
) -> tuple[Program, Program | None]:
    """The forward and backward programs of a plan.

    Saved shape tensors whose content is known symbolically are not saved: the sizes they are made of are.

    Args:
        plan: the plan.
        device: where they run.
        added: what ``added_of`` says of it.
        keeps: whether gradients go on with what their operators have kept, which do not run again.
        kernels: how a kernel runs; None where there are to be none.

    Raises:
        BackendError: an operator has no lowering.
    """
    forward, backward = _written_out(plan.forward), plan.backward and _written_out(plan.backward)
    if kernels is not None:
        forward, backward = _with_kernels(plan, forward, backward, device)
    plan, lower = dataclasses.replace(plan, forward=forward), functools.partial(_lowering, kernels)
    if backward is None:
        return _forward_alone(plan, Writer(forward.graph, device, lower=lower)), None
    bindable = _bindable(forward.graph)
    reader = Writer(backward.graph, device, known=bindable, lower=lower)
    saved = [v for v in backward.graph.inputs[: len(plan.saved)] if v in reader.live]
    visible = [*plan.signature.outputs, *plan.signature.buffer_updates.values()]
    sizes = sorted(reader.symbols & bindable)
    writer = Writer(forward.graph, device, [*visible, *(str(v.name) for v in saved)], sizes=sizes, lower=lower)
    reader.given = _given(writer, saved, visible)
    reader.into = {plan.gradients[name]: f"made[{place}]" for name, place in added.items()}
    for maker, gradient in kept_between(writer.nodes, reader.nodes) if keeps else ():
        writer.kept[maker], reader.kept[gradient] = writer.names.unique("kept"), reader.names.unique("kept")
    weights = _weights(writer, saved, plan.gradients)
    _gather(plan, writer, reader, saved)
    return writer.forward(plan, [str(v.name) for v in saved], sizes), reader.backward(plan, saved, sizes, weights)


def _forward_alone(plan: Plan, writer: Writer) -> Program:
    _gather(plan, writer)
    return writer.forward(plan, [], [])


def compile_body(body: ir.Graph, device: str) -> Program:
    """A graph that reads nothing but its inputs as a function of them, which returns a tuple of its outputs."""
    outer = Writer(body, device)
    text = "\n".join(Writer(body, device).function("kernel", outer))
    return Program("kernel", f"{text}\n", outer.scope, {})


def _lowering(kernels: Callable[[ir.Node], Lowering] | None, node: ir.Node) -> Lowering:
    return kernels(node) if kernels is not None and is_kernel(node) else needed_lowering(node)


def _with_kernels(
    plan: Plan, forward: ir.Model, backward: ir.Model | None, device: str
) -> tuple[ir.Model, ir.Model | None]:
    """The models of a plan with kernels; none reaches over the end of a segment."""
    if backward is None:
        return with_kernels(forward, (), device), None
    parts = [s.nodes for s in plan.segments] if plan.backward is backward else []  # else there are more nodes by now
    return with_kernels(forward, (), device), with_kernels(backward, parts, device)


def _written_out(model: ir.Model) -> ir.Model:
    """The model without nodes that stand for others which have lowerings; itself where there are none."""
    model = expand_nodes(model, is_fused)
    return write_out_nodes(model, lambda node: lowering_of(node) is None)


def _given(writer: Writer, saved: Sequence[ir.Value], visible: Sequence[str]) -> set[ir.Value]:
    """The saved values whose memory the forward pass leaves to the backward pass alone."""
    names = {str(v.name) for v in saved}
    kept = [v for v in writer.results if v.name in names and v.name not in visible]
    held = {*writer.graph.inputs, *(v for v in writer.results if v.name in visible)}
    found = {v.name for v in unshared(writer.nodes, writer.lowerings, kept, held)}
    return {v for v in saved if v.name in found}


def _weights(writer: Writer, saved: Sequence[ir.Value], names: Iterable[str]) -> dict[str, list[ir.Value]]:
    """For each differentiable input the saved values that may share its memory."""
    root = Groups(writer.nodes, writer.lowerings).root
    named = {v.name: v for v in (*writer.graph.inputs, *writer.results)}
    found: dict[ir.Value, list[ir.Value]] = {}
    for value in saved:
        found.setdefault(root(named[value.name]), []).append(value)
    return {name: found.get(root(named[name]), []) for name in names}


def _gather(plan: Plan, writer: Writer, reader: Writer | None = None, saved: Sequence[ir.Value] = ()) -> None:
    """Have the programs gather what is in shards.

    Args:
        plan: of whose shards they are.
        writer: writes the forward pass.
        reader: writes the backward pass; None where there is none.
        saved: the inputs that this one has from the forward pass.
    """
    if plan.gathering is None:
        return
    shards = plan.gathering.shards
    inputs = {str(v.name): v for v in writer.graph.inputs}
    groups = [[inputs[name] for name in group if name in inputs] for group in shards.groups]
    gather(writer, shards, groups, plan.gathering.forward, "enter", "leave")
    if reader is not None:
        held = _weights(writer, saved, inputs)
        read = [{v for value in group for v in held[str(value.name)]} for group in groups]
        gather(reader, shards, read, plan.gathering.backward, "enter_backward", "leave_backward")


def _bindable(graph: ir.Graph) -> set[str]:
    return set().union(*map(sizes_of, itertools.chain(graph.inputs, (v for n in graph for v in n.outputs))))
