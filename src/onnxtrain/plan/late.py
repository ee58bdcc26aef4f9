"""The backward pass of a whole graph kept late, for runtimes that order and merge nodes themselves."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import RECOMPUTED, TrainingGraph, is_backward, notes_of


def hold_back(training: TrainingGraph, loss: str) -> None:
    """Let a backward pass depend on the loss, and what it computes again on the gradients before it, in place.

    A runtime runs a node as early or as late as its inputs allow, and merges nodes that read the same: what is computed
    again would be computed early, or not at all. So the backward pass reads values of the forward pass through a
    ``Reshape`` to their own shape, which copies nothing: to ``[0, 0, …]``, "as it is", where the zeros are made of an
    element of the loss, or of the gradient that is there right before a value is computed again.

    Args:
        training: forward and backward, with copies of nodes as ``plan.copies`` makes them.
        loss: the output that the backward pass begins with.
    """
    holding = _Holding(training, loss)
    for node in [n for n in training.model.graph if is_backward(n)]:
        holding.hold(node)


def forget_sizes(graph: ir.Graph) -> None:
    """Let a graph that was held back say no sizes of what its backward pass makes, in place.

    A runtime that knows two values to have one size gives the memory of the first to the second, and keeps it for that
    from one to the other: from the forward pass to the backward pass.
    """
    for value in (v for n in graph if is_backward(n) for v in n.outputs):
        if value.shape is not None and not value.is_graph_output():
            value.shape = ir.Shape([None] * len(value.shape))


class _Moment:
    """The moment at which a value is there.

    Args:
        value: the value.
        number: its place among all moments.
    """

    def __init__(self, value: ir.Value, number: int) -> None:
        self.value, self.number = value, number
        self._zeros: dict[int, ir.Value] = {}
        self._held: dict[ir.Value, ir.Value] = {}

    def held(self, value: ir.Value, op: Builder) -> ir.Value:
        """A value as it is, but not before that moment."""
        if value not in self._held:
            made = op.Reshape(value, self._shape(shapes.rank(value), op))
            made.type, made.shape = value.type, value.shape
            self._held[value] = made
        return self._held[value]

    def shape(self, numbers: ir.Value, op: Builder) -> ir.Value:
        """A constant shape that is not known before that moment."""
        if numbers not in self._held:
            made = op.Add(numbers, self._shape(len(shapes.data_of(numbers)), op))  # type: ignore[arg-type]
            shapes.set_data(made, shapes.data_of(numbers))  # type: ignore[arg-type]
            self._held[numbers] = made
        return self._held[numbers]

    def _shape(self, rank: int, op: Builder) -> ir.Value:
        """As many zeros as a shape has numbers."""
        if not self._zeros:
            first = op.Slice(op.Reshape(self.value, op.ints(-1)), op.ints(0), op.ints(1), op.ints(0))
            number = op.Cast(op.Cast(first, to=int(ir.DataType.BOOL)), to=int(ir.DataType.INT64))
            self._zeros[1] = op.Mul(op.ReduceSum(number, op.ints(0), keepdims=1), op.ints(0))
        if rank not in self._zeros:
            self._zeros[rank] = op.Mul(self._zeros[1], op.constant(np.zeros(rank, np.int64)))
        return self._zeros[rank]


class _Holding:
    """A walk over the backward pass with the latest moment that it has reached.

    Args:
        training: forward and backward.
        loss: the output that the backward pass begins with.
    """

    def __init__(self, training: TrainingGraph, loss: str) -> None:
        self.graph, signature = training.model.graph, training.signature
        inputs = {str(v.name): v for v in self.graph.inputs}
        self.seeds = {inputs[name] for name in training.output_gradients.values()}
        self.weights = {inputs[name] for name in (*signature.parameters, *signature.buffers) if name in inputs}
        self.first = self.latest = _Moment(next(v for v in self.graph.outputs if v.name == loss), 0)
        self.when: dict[ir.Value, int] = {}  # the number of the moment before which a value is not there

    def hold(self, node: ir.Node) -> None:
        """Hold back what a node of the backward pass reads."""
        is_again = bool(notes_of(node).get(RECOMPUTED))
        moment, op = self.latest if is_again else self.first, Builder(self.graph, before=node, backward=True)
        for index, value in enumerate(node.inputs):
            if value is not None and self._is_early(value):
                node.replace_input_with(index, self._held(value, moment, op))
            elif value is not None and _is_fixed_shape(node, index, value):
                node.replace_input_with(index, self.first.shape(value, op))
        if is_again and self._number(node) < moment.number:
            self._hold_one(node, moment, op)
        if is_again and node.op_type == "BatchNormalization" and shapes.attribute(node, "training_mode", 0):
            _spare_statistics(node, op)
        number = self._number(node)
        if number < 0:
            return
        if not is_again and _is_gradient(node.outputs[0]):
            number = self.latest.number + 1
            self.latest = _Moment(node.outputs[0], number)
        self.when.update(dict.fromkeys(node.outputs, number))

    def _hold_one(self, node: ir.Node, moment: _Moment, op: Builder) -> None:
        """Hold back one input of a node, rather one that is no weight."""
        found = [i for i, v in enumerate(node.inputs) if v is not None and _can_be_held(v)]
        if found:
            index = min(found, key=lambda i: node.inputs[i] in self.weights)
            node.replace_input_with(index, self._held(node.inputs[index], moment, op))  # type: ignore[arg-type]

    def _held(self, value: ir.Value, moment: _Moment, op: Builder) -> ir.Value:
        made = moment.held(value, op)
        self.when[made] = moment.number
        return made

    def _number(self, node: ir.Node) -> int:
        """The last moment before which an input is not there; -1 where all are there at once."""
        return max((self.when.get(v, -1) for v in node.inputs if v is not None), default=-1)

    def _is_early(self, value: ir.Value) -> bool:
        node = value.producer()
        if node is None:
            return value in self.seeds or (value.is_graph_input() and value not in self.weights)
        return not is_backward(node) and _can_be_held(value) and shapes.rank(value) > 0


def _spare_statistics(node: ir.Node, op: Builder) -> None:
    """Let a BatchNormalization that runs again move other statistics: onnxruntime writes over those that it reads.

    It gives the same whatever they are; the scale has their form.
    """
    for index in (3, 4):
        node.replace_input_with(index, op.cast(op.Neg(node.inputs[1]), shapes.dtype_of(node.inputs[index])))  # type: ignore[arg-type]


def _can_be_held(value: ir.Value) -> bool:
    """Whether a value is a tensor that is computed or given, and whose number of axes is known."""
    is_constant = value.is_initializer() and not value.is_graph_input()
    is_tensor = isinstance(value.type, ir.TensorType) and shapes.dims_of(value) is not None
    return is_tensor and not is_constant and shapes.data_of(value) is None


def _is_fixed_shape(node: ir.Node, index: int, value: ir.Value) -> bool:
    """Whether an input is a constant that says what shape a node's output has."""
    has_shape = index == (node.op_type != "ConstantOfShape") and node.op_type in _SHAPED
    return has_shape and value.is_initializer() and isinstance(shapes.data_of(value), tuple)


_SHAPED = ("Reshape", "Expand", "ConstantOfShape")


def _is_gradient(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point() and _can_be_held(value)
