"""What all optimizers have in common: a slot for each parameter, the clipping of gradients, the finished model."""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnxtrain import artifact_names as names
from onnxtrain.errors import ArtifactError
from onnxtrain.ir import shapes
from onnxtrain.ir.scalar_ranks import match_ranks
from onnxtrain.number_ranges import check_names, check_number, check_pair
from onnxtrain.onnxblock.base import Base
from onnxtrain.onnxblock.blocks import Block
from onnxtrain.portable import to_proto

Value = ir.Value
Parameters: TypeAlias = Sequence[ir.TensorProtocol | onnx.TensorProto]


@dataclasses.dataclass
class Slot:
    """One parameter in an optimizer model: its value, its gradient, and a place for its states."""

    base: Base
    parameter: Value
    gradient: Value
    states: dict[str, float] = dataclasses.field(default_factory=dict)
    updates: dict[str, str] = dataclasses.field(default_factory=dict)

    def state(self, name: str, shape: Sequence[int] | None = None) -> Value:
        """A state of the parameter, zeros at first, of the parameter's shape or another one."""
        value = self.parameter
        dims = shapes.known_dims(value) if shape is None else shape
        made = self.base.add_input(f"{value.name}.{name}", shapes.dtype_of(value), dims)
        self.states[str(made.name)] = 0.0
        return made

    def update(self, old: Value, new: Value) -> None:
        """Say what a parameter or state becomes."""
        self.updates[str(old.name)] = self.base.output(new, names.updated(str(old.name)))


def _input(base: Base, tensor: ir.TensorProtocol | onnx.TensorProto) -> Value:
    """The input that a parameter is."""
    if isinstance(tensor, onnx.TensorProto):
        tensor = ir.from_proto(tensor)
    return base.add_input(str(tensor.name), tensor.dtype, [int(d) for d in tensor.shape])  # type: ignore[union-attr]


def _gradient(base: Base, weight: Value) -> Value:
    """The input for the gradient of a parameter."""
    dims = list(shapes.known_dims(weight))
    return base.add_input(names.gradient(str(weight.name)), shapes.dtype_of(weight), dims)


class Optimizer(Block, abc.ABC):
    """An optimizer over parameters; ``update`` says what one parameter becomes.

    Args:
        clip_grad: how gradients are changed before they are used, such as ``ClipGradNorm(1.0)``.
        weight_decay: factor of the decay.
        no_decay: patterns of parameter names that do not decay, such as ``"*bias"``.
    """

    def __init__(
        self, *, clip_grad: ClipGradNorm | None = None, weight_decay: float = 0.0, no_decay: Sequence[str] = ()
    ) -> None:
        if clip_grad is not None and not isinstance(clip_grad, Block):
            what = f"clip_grad={clip_grad!r} is no block that clips"
            raise ArtifactError(what, cure="give onnxblock.optim.ClipGradNorm(1.0)")
        self.clip_grad, self.no_decay = clip_grad, check_names("no_decay", no_decay)
        self.weight_decay = check_number("weight_decay", weight_decay, least=0)
        self._facts: dict[str, Any] | None = None
        self._built: Base | None = None

    def build(self, parameters: Parameters | tuple[Parameters, Parameters]) -> tuple[str, ...]:
        """Add the update of every parameter; the names of the model's outputs.

        Args:
            parameters: tensors with names: what ``TrainingBlock.parameters()`` gives, or the first part of it.
        """
        trainable: Any = parameters
        if isinstance(parameters, tuple) and len(parameters) == 2 and isinstance(parameters[0], list | tuple):
            trainable = parameters[0]
        if not trainable:
            raise ArtifactError("there is no parameter to train", cure="give the trainable parameters")
        self._built = base = self.base
        weights = [_input(base, tensor) for tensor in trainable]  # first, so that they have the names that they have
        self.rate = base.add_input(names.LEARNING_RATE, ir.DataType.FLOAT, [])
        step = base.add_input(names.STEP, ir.DataType.INT64, [])
        slots = [Slot(base, weight, _gradient(base, weight)) for weight in weights]
        given = {str(s.parameter.name): str(s.gradient.name) for s in slots}
        next_step = self.op.Add(step, self.op.constant(1, ir.DataType.INT64))
        counted = base.output(next_step, names.updated(names.STEP))
        gradients = [s.gradient for s in slots]
        if self.clip_grad is not None:
            gradients = [self.value(name) for name in self.clip_grad(*given.values())]
        with self.op.arithmetic():
            self.prepare(self.op.Cast(next_step, to=int(ir.DataType.FLOAT)))
            for slot, gradient in zip(slots, gradients, strict=True):
                slot.gradient = gradient
                self.update(slot)
        scalars = {"learning_rate": str(self.rate.name), "step": str(step.name)}
        self._facts = self._describe(slots) | scalars | {"parameters": given}
        self._facts["updates"][str(step.name)] = counted
        return tuple(str(v.name) for v in base.ir_model.graph.outputs)

    def _describe(self, slots: Sequence[Slot]) -> dict[str, Any]:
        return {
            "kind": "optimizer",
            "optimizer": self.describe(),
            "states": {name: first for s in slots for name, first in s.states.items()},
            "updates": {old: new for s in slots for old, new in s.updates.items()},
        }

    def describe(self) -> str:
        """The optimizer and its settings, to compare a checkpoint with."""
        plain = (int, float, str, tuple)
        settings = {k: v for k, v in vars(self).items() if isinstance(v, plain) and k[0] != "_"}
        if self.clip_grad is not None:
            settings["clip_grad"] = repr(self.clip_grad)
        return f"{type(self).__name__} {json.dumps(settings, sort_keys=True)}"

    def to_model_proto(self) -> onnx.ModelProto:
        """The optimizer model, once it is built.

        Raises:
            ArtifactError: the block was not called.
        """
        if self._facts is None or self._built is None:
            raise ArtifactError("the optimizer is not built", cure="call it with the parameters first")
        model = self._built.ir_model.clone()
        match_ranks(model.graph)
        return to_proto(model, self._facts)

    def prepare(self, step: Value) -> None:
        """Scalars that all parameters share; ``step`` counts from 1."""

    @abc.abstractmethod
    def update(self, slot: Slot) -> None:
        """Add the update of one parameter."""

    def decays(self, slot: Slot) -> bool:
        """Whether weight decay concerns a parameter."""
        name = str(slot.parameter.name)
        return bool(self.weight_decay) and not any(fnmatch.fnmatchcase(name, p) for p in self.no_decay)

    def rate_of(self, slot: Slot) -> Value:
        """The learning rate in the parameter's element type."""
        return self.op.cast(self.rate, shapes.dtype_of(slot.parameter))

    def scalar(self, value: Value, slot: Slot) -> Value:
        """A shared scalar in the parameter's element type."""
        return self.op.cast(value, shapes.dtype_of(slot.parameter))


def check_betas(betas: Sequence[float]) -> tuple[float, float]:
    """Both factors of running means, which are less than 1."""
    first, second = check_pair("betas", betas)
    return check_number("betas", first, least=0, below=1), check_number("betas", second, least=0, below=1)


class ClipGradNorm(Block):
    """Gradients times ``min(1, max_norm / (norm + 1e-6))`` with the norm of all of them, as torch's clip_grad_norm_."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = check_number("max_norm", max_norm, above=0)

    def __repr__(self) -> str:
        return f"ClipGradNorm({self.max_norm})"

    def build(self, *gradients: str) -> tuple[str, ...]:
        """Add the norm and the products; the names of the clipped gradients."""
        op = self.op
        values = [self.value(g) for g in gradients]
        with op.arithmetic():
            squares = [op.Cast(op.ReduceSumSquare(g, keepdims=0), to=int(ir.DataType.FLOAT)) for g in values]
            total = op.Sqrt(squares[0] if len(squares) == 1 else op.Sum(*squares))
            share = op.Min(op.like(self.max_norm, total) / (total + 1e-6), op.like(1.0, total))
            return tuple(str((g * op.cast(share, shapes.dtype_of(g))).name) for g in values)
