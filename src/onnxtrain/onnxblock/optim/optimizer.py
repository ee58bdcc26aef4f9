"""What all optimizers have in common: a slot for each parameter, the clipping of gradients, the finished model."""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain import artifact_names as names
from onnxtrain.errors import ArtifactError
from onnxtrain.ir import shapes
from onnxtrain.onnxblock.base import Base
from onnxtrain.onnxblock.blocks import Block
from onnxtrain.portable import to_proto

Value = ir.Value


@dataclasses.dataclass
class Slot:
    """One parameter in an optimizer model: its value, its gradient, and a place for its states."""

    base: Base
    parameter: Value
    gradient: Value
    states: dict[str, float]

    def state(self, name: str, shape: Sequence[int] | None = None) -> Value:
        """A state of the parameter, zeros at first, of the parameter's shape or another one."""
        value = self.parameter
        dims = shapes.known_dims(value) if shape is None else shape
        made = self.base.add_input(f"{value.name}.{name}", shapes.dtype_of(value), dims)
        self.states[str(made.name)] = 0.0
        return made

    def update(self, old: Value, new: Value) -> None:
        """Say what a parameter or state becomes."""
        self.base.output(new, names.updated(str(old.name)))


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
        self.clip_grad, self.weight_decay, self.no_decay = clip_grad, weight_decay, tuple(no_decay)
        self._facts: dict[str, Any] | None = None

    def build(self, parameters: Sequence[ir.TensorProtocol | onnx.TensorProto]) -> tuple[str, ...]:
        """Add the update of every parameter; the names of the model's outputs.

        Args:
            parameters: tensors with names: the first part of what ``TrainingBlock.parameters()`` gives.
        """
        if not parameters:
            raise ArtifactError("there is no parameter to train", cure="give the trainable parameters")
        base = self.base
        self.rate = base.add_input(names.LEARNING_RATE, ir.DataType.FLOAT, [])
        step = base.add_input(names.STEP, ir.DataType.INT64, [])
        next_step = self.op.Add(step, self.op.constant(1, ir.DataType.INT64))
        base.output(next_step, names.updated(names.STEP))
        slots = [self._slot(base, tensor) for tensor in parameters]
        gradients = [s.gradient for s in slots]
        if self.clip_grad is not None:
            clipped = self.clip_grad(*(str(g.name) for g in gradients))
            gradients = [self.value(name) for name in clipped]
        with self.op.arithmetic():
            self.prepare(self.op.Cast(next_step, to=int(ir.DataType.FLOAT)))
            for slot, gradient in zip(slots, gradients, strict=True):
                slot.gradient = gradient
                self.update(slot)
        self._facts = self._describe(slots)
        return tuple(str(v.name) for v in base.model.graph.outputs)

    def _slot(self, base: Base, tensor: ir.TensorProtocol | onnx.TensorProto) -> Slot:
        if isinstance(tensor, onnx.TensorProto):
            tensor = ir.from_proto(tensor)
        dims, name = [int(d) for d in tensor.shape], str(tensor.name)  # type: ignore[union-attr]
        return Slot(
            base, base.add_input(name, tensor.dtype, dims), base.add_input(names.gradient(name), tensor.dtype, dims), {}
        )

    def _describe(self, slots: Sequence[Slot]) -> dict[str, Any]:
        return {
            "kind": "optimizer",
            "optimizer": self.describe(),
            "parameters": {str(s.parameter.name): names.gradient(str(s.parameter.name)) for s in slots},
            "states": {name: first for s in slots for name, first in s.states.items()},
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
        if self._facts is None:
            raise ArtifactError("the optimizer is not built", cure="call it with the parameters first")
        return to_proto(self.base.model, self._facts)

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


class ClipGradNorm(Block):
    """Gradients times ``min(1, max_norm / (norm + 1e-6))`` with the norm of all of them, as torch's clip_grad_norm_."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = max_norm

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
