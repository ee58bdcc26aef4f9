"""ForwardBlock and TrainingBlock: from blocks to models that are run."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifact_names import RESET, accumulation
from onnxtrain.errors import ArtifactError
from onnxtrain.gradient import build_gradient, tracked_outputs
from onnxtrain.ir import linear_models, shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Signature, TrainingGraph, describe
from onnxtrain.ir.reading import decision_of, restore_weights
from onnxtrain.ir.scalar_ranks import match_ranks
from onnxtrain.ir.standard_form import attach
from onnxtrain.ir.weights import Kind, is_meant
from onnxtrain.onnxblock.base import Base, is_floating
from onnxtrain.onnxblock.blocks import Block
from onnxtrain.onnxblock.budget import fitted
from onnxtrain.onnxblock.running_statistics import give_statistics
from onnxtrain.optimize import optimize, optimize_training
from onnxtrain.options import Options
from onnxtrain.plan.late import forget_sizes
from onnxtrain.portable import to_proto

_GOLDEN = 0x9E3779B1  # 2³² / the golden ratio: multiples of it are spread evenly


class ForwardBlock(Block):
    """A block whose outputs are the outputs of the whole model.

    Attributes:
        outputs: their names, once it is built.
    """

    def __init__(self) -> None:
        self._base: Base | None = None
        self.outputs: tuple[str, ...] = ()

    def __call__(self, *names: Any, **named: Any) -> Any:
        """Build the block; what it returns are the model's outputs."""
        made = self.build(*names, **named)
        self._base = self.base
        self._base.refresh()
        self.outputs = made if isinstance(made, tuple) else (made,)
        return made

    def built(self) -> Base:
        """The model that the block was built in.

        Raises:
            ArtifactError: it was not called.
        """
        if self._base is None:
            raise ArtifactError(f"{type(self).__name__} is not built", cure="call it within `with onnxblock.base(...)`")
        self._base.take_over()
        return self._base

    def to_model_proto(self) -> Any:
        """The model with its weights as initializers."""
        base = self.built()
        model = _with_outputs(base, self.outputs)
        restore_weights(model, base.weights)
        return to_proto(model)


class TrainingBlock(ForwardBlock):
    """A block whose first output is the loss; makes the models that train and evaluate it.

    Names given to ``requires_grad`` may be patterns, such as ``"head.*"``.

    Attributes:
        batch_statistics: BatchNormalization takes the statistics of the batch and keeps running ones as PyTorch does.
        memory_options: the memory budget and the worst case.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[str, bool] = {}
        self._trainable: tuple[str, ...] | None = None
        self.batch_statistics = False
        self.memory_options = Options()

    def requires_grad(self, name: str, value: bool = True) -> None:
        """Say that weights of that name are trained, or that they are not."""
        self._asked[name] = value
        self._trainable = None

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """The weights that are trained and those that are not, as tensors with names.

        Raises:
            ArtifactError: the block is not built, or a name is not known.
        """
        trainable, frozen = self.tensors()
        return [_as_proto(t) for t in trainable], [_as_proto(t) for t in frozen]

    def tensors(self) -> tuple[list[ir.TensorProtocol], list[ir.TensorProtocol]]:
        """What ``parameters`` gives as tensors of ``onnx_ir``, which are not copied."""
        trainable, base = self._chosen(), self.built()
        frozen = [n for n in base.weights if n not in set(trainable)]
        return [_named(base, n) for n in trainable], [_named(base, n) for n in frozen]

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the evaluation model.

        The inputs of both are the user's, then all weights; the training model also takes ``lazy_reset_grad`` and, for
        each trained weight ``p``, ``p_grad.accumulation.buffer``, and gives ``p_grad.accumulation.out``. Running
        statistics ``s`` that batches change are given as ``s.out``.

        Raises:
            ArtifactError: as for ``parameters``; nothing would be trained, the loss is no scalar, or does not depend on
                a weight named.
            GradientError: the loss cannot be differentiated.
            OptionError, BudgetError: as for ``generate_artifacts``, where ``memory_options`` has a budget.
        """
        base, trainable = self.built(), self._chosen()
        if not trainable:
            raise ArtifactError(
                f"nothing would be trained; the model's initializers are {_some(list(base.weights))}",
                cure="name what to train in requires_grad",
            )
        training = _training_model(base, self.outputs, trainable, self.batch_statistics, self.memory_options)
        return training, self._evaluation_model(base)

    def _evaluation_model(self, base: Base) -> onnx.ModelProto:
        model = _with_outputs(base, self.outputs)
        for node in model.graph.all_nodes():
            _evaluate(node)
        inputs = [str(v.name) for v in model.graph.inputs if v.name not in base.weights]
        facts = {"kind": "evaluation", "inputs": inputs, "outputs": list(self.outputs), "weights": list(base.weights)}
        return to_proto(model, facts | {"predictions": list(base.predictions)})

    def _chosen(self) -> tuple[str, ...]:
        """The weights that are trained, in the order of the model."""
        base = self.built()
        if self._trainable is None:
            self._trainable = _trainable(base, self.outputs[0], self._asked)
        return self._trainable


def _trainable(base: Base, loss: str, asked: dict[str, bool]) -> tuple[str, ...]:
    """What was asked for, once it is known to exist and to be reached by the loss."""
    for name in asked:
        if not _is_pattern(name) or name in base.weights or name in base.ir_model.graph.initializers:
            base.weight(name)
        elif not fnmatch.filter(base.weights, name):
            _take_constants(base, name)
    wanted = [n for n in base.weights if _decision(n, asked, base.weights)]
    if not wanted:
        _refuse_attributes(base)
    reached = _reached(base, loss, wanted) if wanted else ()
    if lost := [n for n in wanted if n not in reached]:
        raise ArtifactError(
            f"the loss does not depend on {_some(lost)}", cure="leave them out of requires_grad, or mend the loss"
        )
    return tuple(wanted)


def _take_constants(base: Base, pattern: str) -> None:
    """Make weights of the constants that match a pattern, which no weight does."""
    constants = base.ir_model.graph.initializers
    found = fnmatch.filter([n for n, v in constants.items() if is_floating(v)], pattern)
    if not found:
        raise ArtifactError(f"no initializer is called like {pattern}", cure="name initializers of the model")
    for name in found:
        base.weight(name)


def _refuse_attributes(base: Base) -> None:
    """Say so where weights are attributes of nodes, which no gradient reaches: of trees and the like."""
    for node in base.ir_model.graph:
        if node.domain == linear_models.DOMAIN and any(a.type.name == "FLOATS" for a in node.attributes.values()):
            what = f"{node.op_type} has its weights in attributes, which cannot be trained"
            cure = "train a model whose weights are initializers, as those of linear models and networks are"
            raise ArtifactError(what, node=describe(node), cure=cure)


def _decision(name: str, asked: dict[str, bool], known: Container[str]) -> bool:
    """What was said of a name; the last word counts, and a whole name more than a pattern."""
    if name in asked:
        return asked[name]
    found = [value for pattern, value in asked.items() if is_meant(name, pattern, known)]
    return bool(found) and found[-1]


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "(none)"


def reached_weights(base: Base, loss: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a loss depends on through operators with a gradient: weights, and what may be weights."""
    kinds = {str(v.name): d.kind for v in base.ir_model.graph.inputs if (d := decision_of(v)) is not None}
    reached = _reached(base, loss, [n for n in base.weights if kinds.get(n) is not Kind.STATISTIC])
    doubtful = tuple(n for n in reached if kinds.get(n) is Kind.DOUBTFUL)
    return tuple(n for n in reached if n not in doubtful), doubtful


def _reached(base: Base, loss: str, names: Sequence[str]) -> tuple[str, ...]:
    """Which of the weights have a gradient."""
    model = _with_outputs(base, [loss])
    inputs = tuple(str(v.name) for v in model.graph.inputs)
    graph = ForwardGraph(model, Signature(inputs, (), (), (loss,), {}, tuple(names)))
    optimize(graph)  # as what is trained will be: quantization has a gradient once it is one operator
    if not tracked_outputs(graph):
        return ()
    found = build_gradient(graph, [loss]).gradients
    return tuple(n for n in names if n in found)


def _named(base: Base, name: str) -> ir.TensorProtocol:
    tensor = base.weights[name]
    tensor.name = name
    return tensor


def _as_proto(tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """A copy of a tensor, which may lie in a file."""
    return ir.to_proto(ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name))


def _with_outputs(base: Base, names: Sequence[str]) -> ir.Model:
    """A copy of the model whose outputs are these values, under these names; weights are its last inputs."""
    model = base.ir_model.clone()
    model.graph.inputs[:] = sorted(model.graph.inputs, key=lambda v: v.name in base.weights)
    held = Base(model)
    found = [held.value(n) for n in names]
    model.graph.outputs.clear()
    for value in found:
        if value.is_graph_input() or value in model.graph.outputs or value.is_initializer():
            value = held.op.Identity(value)
        model.graph.outputs.append(value)
    return model


def _evaluate(node: ir.Node) -> None:
    """A node as it is in evaluation: Dropout passes on, BatchNormalization reads its running statistics."""
    if node.domain:
        return
    if node.op_type == "Dropout" and len(node.inputs) > 2:
        node.replace_input_with(2, None)
        node.resize_inputs(2)
    elif node.op_type == "BatchNormalization" and shapes.attribute(node, "training_mode", 0):
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
        assert isinstance(node.graph, ir.Graph)
        for new, old in zip(node.outputs[1:], node.inputs[3:5], strict=False):
            kept, name = Builder(node.graph, before=node).Identity(old), new.name  # they stay as they are
            new.replace_all_uses_with(kept, replace_graph_outputs=True)
            new.name, kept.name = None, name
        node.resize_outputs(1)


def _training_model(
    base: Base, outputs: Sequence[str], trainable: Sequence[str], batch_statistics: bool, options: Options
) -> onnx.ModelProto:
    """Forward and backward in one model, gradients added to buffers."""
    model = _with_outputs(base, outputs)
    loss = model.graph.outputs[0]
    if shapes.known_dims(loss) != () or not loss.dtype or not loss.dtype.is_floating_point():
        raise ArtifactError(f"the loss {loss.name} has shape {loss.shape}, not that of a scalar", cure="reduce it")
    updates = give_statistics(model.graph, batch_statistics)
    draws = _seed(model.graph)
    inputs = [str(v.name) for v in model.graph.inputs if v.name not in base.weights]
    names = tuple(str(v.name) for v in model.graph.outputs)
    frozen = tuple(n for n in base.weights if n not in set(trainable))
    signature = Signature(tuple(inputs), tuple(trainable), frozen, names, updates, tuple(trainable))
    forward = ForwardGraph(model, signature)
    optimize(forward)
    training = build_gradient(forward, [str(loss.name)])
    optimize_training(training)
    if options.memory_budget is not None:
        training = fitted(training, str(loss.name), options)
    made = attach(_closed(training))
    match_ranks(made.graph)
    if options.memory_budget is not None:
        forget_sizes(made.graph)
    reset, accumulated = _accumulate(made.graph, training.gradients)
    facts = {
        "kind": "training",
        "inputs": inputs,
        "outputs": list(outputs),
        "trainable": list(trainable),
        "frozen": list(frozen),
        "reset": reset,
        "gradients": accumulated,
        "updates": updates,
        "draws": draws,
    }
    return to_proto(made, facts)


def _seed(graph: ir.Graph) -> int:
    """Give each Dropout that has none a seed of its own; the number of nodes that draw."""
    nodes = [n for n in graph.all_nodes() if n.op_type == "Dropout" and n.domain == "" and len(n.inputs) > 2]
    for index, node in enumerate(nodes, 1):
        if "seed" not in node.attributes:
            node.attributes["seed"] = ir.AttrInt64("seed", index * _GOLDEN % 2**31)
    return len(nodes)


def _closed(training: TrainingGraph) -> ir.Model:
    """The training graph with 1 as the gradient of the loss, which is then no input."""
    graph = training.model.graph
    for name in training.output_gradients.values():
        seed = next(v for v in graph.inputs if v.name == name)
        graph.inputs.remove(seed)
        seed.const_value = ir.tensor(np.ones([], shapes.dtype_of(seed).numpy()), name=name)
        graph.register_initializer(seed)
    return training.model


def _accumulate(graph: ir.Graph, gradients: dict[str, str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Add each gradient to its buffer, or begin anew: ``out = If(reset, gradient, buffer + gradient)``.

    An ``If`` costs one copy, a ``Where`` would cost five passes over the gradient. The buffer is read by that node
    alone, so a runtime may write the result over it.

    Returns:
        The name of the input that resets, and of the buffer and the result of each parameter.
    """
    base = Base(ir.Model(graph, ir_version=10))
    reset = base.add_input(RESET, ir.DataType.BOOL, [])
    made = {str(v.name): v for v in graph.outputs}
    names = {}
    for parameter, name in gradients.items():
        dx = made[name]
        before, after = accumulation(parameter)
        buffer = base.add_input(before, shapes.dtype_of(dx), list(shapes.known_dims(dx)))
        after = base.free_name(after)
        names[parameter] = (str(buffer.name), after)
        branches = [
            _branch(f"{after}.first", "Identity", [dx]),
            _branch(f"{after}.more", "Add", [buffer, dx]),
        ]
        attributes = [ir.AttrGraph(n, b) for n, b in zip(("then_branch", "else_branch"), branches, strict=True)]
        node = ir.Node("", "If", [reset], attributes=attributes, num_outputs=1, name=f"{after}.If")
        graph.append(node)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = after, dx.type, dx.shape
        graph.outputs[list(graph.outputs).index(dx)] = node.outputs[0]
    return str(reset.name), names


def _branch(name: str, op_type: str, operands: Sequence[ir.Value]) -> ir.Graph:
    node = ir.Node("", op_type, list(operands), num_outputs=1, name=name)
    y = node.outputs[0]
    y.name, y.type, y.shape = f"{name}.value", operands[0].type, operands[0].shape
    return ir.Graph([], [y], nodes=[node], name=name)
