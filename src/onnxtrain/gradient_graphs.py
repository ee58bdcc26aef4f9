"""Gradients as ordinary models: an ``.onnx`` that gives the derivatives of another one's outputs."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import GradientError, close_to
from onnxtrain.gradient import build_gradient, tracked_outputs
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, TrainingGraph, is_backward
from onnxtrain.ir.reading import Source, read_weights, restore_weights
from onnxtrain.number_ranges import check_names
from onnxtrain.optimize import optimize, optimize_training
from onnxtrain.portable import to_proto


def gradient_graph(
    model: Source,
    wrt: str | Sequence[str],
    outputs: str | Sequence[str] | None = None,
    *,
    seeds: bool = False,
    keep_outputs: bool = True,
) -> onnx.ModelProto:
    """A model that computes the gradient of another model's outputs with respect to its inputs or weights.

    For saliency, forces (−dE/dx), guidance. It runs wherever ONNX runs: standard operators and functions with bodies.
    Inputs, outputs and initializers keep their names, and weights stay initializers. The gradient of ``x`` is the
    output ``x_grad``, of the shape of ``x``; where the model has a value of that name, ``x_grad_1``. Gradients come
    after the outputs in the order of ``wrt``. The model itself may be a gradient graph: the result then has second
    derivatives.

    Args:
        model: path of the ``.onnx`` file, or the model; it is not changed. Dropout and BatchNormalization do what the
            file says.
        wrt: names of inputs, initializers or outputs of ``Constant`` nodes, or patterns of the first two:
            ``"encoder.*"``.
        outputs: what is differentiated: the sum of all elements of these outputs; None is all that depend on ``wrt``.
        seeds: take the gradients of the outputs as inputs ``{output}_grad`` of the outputs' shapes, in place of ones.
        keep_outputs: give back the model's own outputs too.

    Raises:
        GradientError: a name is not known (close ones are listed), is of no floating type, or has no part in the
            outputs; or an operator on the way has no gradient.
        GraphError: the model cannot be read.
    """
    asked = [wrt] if isinstance(wrt, str) else list(check_names("wrt", wrt, error=GradientError))
    forward, weights = read_weights(model, asked)
    names = _chosen(forward, asked)
    forward = ForwardGraph(forward.model, dataclasses.replace(forward.signature, differentiable=names))
    optimize(forward)
    training = build_gradient(forward, _differentiated(forward, outputs))
    if lost := [n for n in names if n not in training.gradients]:
        what = ", ".join(training.output_gradients) or ", ".join(forward.signature.outputs)
        raise GradientError(f"{what} does not depend on {', '.join(lost)}", cure="leave it out of wrt")
    if not seeds:
        _seed_with_ones(training)
    if not keep_outputs:
        kept = set(training.gradients.values())
        training.model.graph.outputs[:] = [v for v in training.model.graph.outputs if v.name in kept]
    _in_order(training, names)
    optimize_training(training)
    _drop_unread(training.model.graph, weights)
    restore_weights(training.model, weights)
    return to_proto(training.model)


def _chosen(graph: ForwardGraph, asked: Sequence[str]) -> tuple[str, ...]:
    """The inputs and weights of these names, in this order."""
    inputs = {str(v.name): v for v in graph.model.graph.inputs}
    found: dict[str, None] = {}
    for name in asked:
        matched = [name] if name in inputs else fnmatch.filter(inputs, name)
        if not matched:
            raise GradientError(
                f"the model has no input or initializer {name}{close_to(name, inputs)}", cure="name others in wrt"
            )
        found.update(dict.fromkeys(matched))
    if not found:
        raise GradientError("wrt is empty: there is nothing to differentiate by", cure="name inputs or initializers")
    for name in found:
        dtype = inputs[name].dtype
        if dtype is None or not dtype.is_floating_point():
            raise GradientError(f"{name} is of type {dtype}, which has no gradient", cure="leave it out of wrt")
    return tuple(found)


def _differentiated(graph: ForwardGraph, outputs: str | Sequence[str] | None) -> tuple[str, ...]:
    """The outputs to differentiate, once they are known to depend on what is asked for."""
    known, tracked = graph.signature.outputs, tracked_outputs(graph)
    if outputs is None:
        return tracked
    chosen = (outputs,) if isinstance(outputs, str) else check_names("outputs", outputs, error=GradientError)
    for name in chosen:
        if name not in known:
            raise GradientError(f"the model has no output {name}{close_to(name, known)}", cure="name one of them")
        if name not in tracked:
            by = ", ".join(graph.signature.differentiable)
            raise GradientError(f"the output {name} does not depend on {by}", cure="leave it out of outputs")
    return chosen


def _seed_with_ones(training: TrainingGraph) -> None:
    """Ones in place of the inputs that receive the outputs' gradients."""
    graph = training.model.graph
    op = Builder(graph, before=next((n for n in graph if is_backward(n)), None), backward=True)
    inputs = {str(v.name): v for v in graph.inputs}
    made = {str(v.name): v for v in graph.outputs}
    for output, name in training.output_gradients.items():
        y, seed = made[output], inputs[name]
        scalar = shapes.dims_of(y) == ()
        one = op.constant(np.ones([]), shapes.dtype_of(y))
        ones = one if scalar else op.Expand(one, op.shape(y))
        graph.inputs.remove(seed)
        seed.replace_all_uses_with(ones, replace_graph_outputs=True)
    training.output_gradients.clear()


def _in_order(training: TrainingGraph, names: Sequence[str]) -> None:
    """Outputs in order: the model's own, then gradients as they were asked for."""
    outputs = training.model.graph.outputs
    place = {training.gradients[n]: i for i, n in enumerate(names)}
    outputs[:] = sorted(outputs, key=lambda v: place.get(str(v.name), -1))


def _drop_unread(graph: ir.Graph, weights: Mapping[str, ir.TensorProtocol]) -> None:
    """Weights that nothing reads any more are no part of the model."""
    for value in [v for v in graph.inputs if v.name in weights and not v.uses() and not v.is_graph_output()]:
        graph.inputs.remove(value)
