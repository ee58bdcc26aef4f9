"""Optimizers: parameters in, a model out that takes gradients and gives new parameters and states.

The model's inputs are ``learning_rate`` (float32 scalar), ``step`` (int64 scalar, updates done so far), and for each
parameter ``p`` its value ``p``, its gradient ``p_grad``, and its states, such as ``p.exp_avg``. Whatever an input X
becomes is the output ``X.out``. Each old value is read only by nodes that its new value depends on, so a runtime may
write the new over the old whatever the order in which it runs the nodes (``api.Optimizer`` checks that and does it).
"""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
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
        settings = {k: v for k, v in vars(self).items() if isinstance(v, int | float | str | tuple) and k[0] != "_"}
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


class SGD(Optimizer):
    """Stochastic gradient descent, the formula of torch.optim.SGD.

    Args:
        momentum, dampening, nesterov: as there.
        weight_decay: added to the gradient, times the parameter.
    """

    def __init__(
        self,
        clip_grad: ClipGradNorm | None = None,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(clip_grad=clip_grad, weight_decay=weight_decay, no_decay=no_decay)
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArtifactError("Nesterov's momentum needs a momentum and no dampening", cure="set momentum=0.9")

    def prepare(self, step: Value) -> None:
        """The gradient counts whole in the first step, whatever the dampening."""
        op = self.op
        first = op.Equal(step, op.like(1.0, step))
        self.share = op.Where(first, op.like(1.0, step), op.like(1.0 - self.dampening, step))

    def update(self, slot: Slot) -> None:
        """``p - rate · direction``."""
        p, g = slot.parameter, slot.gradient
        if self.decays(slot):
            g = g + p * self.weight_decay
        if self.momentum:
            buffer = slot.state("momentum_buffer")
            new = buffer * self.momentum + (g * self.scalar(self.share, slot) if self.dampening else g)
            slot.update(buffer, new)
            g = g + new * self.momentum if self.nesterov else new
        slot.update(p, p - g * self.rate_of(slot))


class _Moments(Optimizer):
    """Optimizers with running means of gradients and of their squares."""

    def __init__(
        self, bias_correction: bool, betas: tuple[float, float], eps: float, weight_decay: float, **given: Any
    ) -> None:
        super().__init__(weight_decay=weight_decay, **given)
        self.bias_correction, self.betas, self.eps = bias_correction, tuple(betas), eps

    def prepare(self, step: Value) -> None:
        """Bias corrections ``1 - βᵗ``, and the rate that takes account of both.

        They are computed in double: in single precision ``1 - 0.999`` is wrong in its fifth digit.
        """
        op = self.op
        self.root: Value | None = None
        self.corrected = self.rate
        if self.bias_correction:
            exact = op.Cast(step, to=int(ir.DataType.DOUBLE))
            powers = (op.Pow(op.like(b, exact), exact) for b in self.betas)
            first, second = (op.cast(op.like(1.0, exact) - p, shapes.dtype_of(step)) for p in powers)
            self.root = op.Sqrt(second)
            self.corrected = self.rate * self.root / first

    def moments(self, slot: Slot, gradient: Value) -> tuple[Value, Value]:
        """The new running means of the gradient and of its square."""
        average, square = slot.state("exp_avg"), slot.state("exp_avg_sq")
        first, second = self.betas
        new = average * first + gradient * (1.0 - first)
        new_square = square * second + gradient * gradient * (1.0 - second)
        slot.update(average, new)
        slot.update(square, new_square)
        return new, new_square


class Adam(_Moments):
    """The formula of torch.optim.Adam: weight decay is part of the gradient."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(bias_correction, betas, eps, weight_decay, clip_grad=clip_grad, no_decay=no_decay)

    def update(self, slot: Slot) -> None:
        """``p - rate·√c₂/c₁ · m / (√v + ε·√c₂)`` with bias corrections c: torch's formula times √c₂ / √c₂."""
        p, g = slot.parameter, slot.gradient
        if self.decays(slot):
            g = g + p * self.weight_decay
        slot.update(p, p - self.direction(slot, g))

    def direction(self, slot: Slot, gradient: Value) -> Value:
        """What is subtracted from the parameter."""
        op = self.op
        average, square = self.moments(slot, gradient)
        eps = op.like(self.eps, average) if self.root is None else self.scalar(self.root, slot) * self.eps
        return average / (op.Sqrt(square) + eps) * self.scalar(self.corrected, slot)


class AdamW(Adam):
    """Adam with decoupled weight decay, in one of two formulas.

    Args:
        bias_correction: divide the running means by ``1 - βᵗ``.
        betas: β of both running means.
        eps: added to the root.
        weight_decay: factor of ``rate · p``.
        clip_grad: how gradients are clipped.
        formula: ``"huggingface"`` adds eps before the bias correction and decays after the update, as
            onnxruntime-training did; ``"torch"`` is torch.optim.AdamW, whose eps is 1e-8 and weight_decay 1e-2.
        no_decay: patterns of names of parameters that do not decay.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        formula: str = "huggingface",
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(bias_correction, betas, eps, weight_decay, clip_grad, no_decay=no_decay)
        if formula not in ("huggingface", "torch"):
            raise ArtifactError(f"formula={formula!r} is not known", cure="choose 'huggingface' or 'torch'")
        self.formula = formula

    def update(self, slot: Slot) -> None:
        """The step and the decay, in the order of the formula."""
        p, op = slot.parameter, self.op
        if self.formula == "torch":
            step = self.direction(slot, slot.gradient)
            slot.update(p, (p * self._kept(slot) if self.decays(slot) else p) - step)
            return
        average, square = self.moments(slot, slot.gradient)
        new = p - average / (op.Sqrt(square) + self.eps) * self.scalar(self.corrected, slot)
        slot.update(p, new * self._kept(slot) if self.decays(slot) else new)

    def _kept(self, slot: Slot) -> Value:
        """``1 - rate · weight_decay``."""
        return self.op.like(1.0, slot.parameter) - self.rate_of(slot) * self.weight_decay


class Lion(Optimizer):
    """Sign of a mean of gradients and their running mean, decoupled weight decay (arXiv 2302.06675, algorithm 2)."""

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(clip_grad=clip_grad, weight_decay=weight_decay, no_decay=no_decay)
        self.betas = tuple(betas)

    def update(self, slot: Slot) -> None:
        """Both means from one difference, so that the old running mean is read once."""
        op, p, g = self.op, slot.parameter, slot.gradient
        average, rate = slot.state("exp_avg"), self.rate_of(slot)
        difference = average - g
        step = op.Sign(g + difference * self.betas[0]) * rate
        slot.update(average, g + difference * self.betas[1])
        kept = p * (op.like(1.0, p) - rate * self.weight_decay) if self.decays(slot) else p
        slot.update(p, kept - step)


class Adafactor(Optimizer):
    """The formula of torch.optim.Adafactor: squares of gradients are kept as means of rows and of columns.

    Args:
        beta2_decay: exponent of the step that the mean forgets with.
        eps: least root of a mean (None: that of float32), and least size of a parameter.
        d: largest size of an update.
        weight_decay: decoupled.
        clip_grad: how gradients are clipped.
        no_decay: patterns of names of parameters that do not decay.
    """

    def __init__(
        self,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(clip_grad=clip_grad, weight_decay=weight_decay, no_decay=no_decay)
        self.beta2_decay, self.least_size, self.d = beta2_decay, eps[1], d
        self.least_root = 2.0**-23 if eps[0] is None else eps[0]

    def prepare(self, step: Value) -> None:
        """How much of a new square counts, and the rate that falls with the step."""
        op = self.op
        self.share = op.Pow(step, op.like(self.beta2_decay, step))
        self.relative = op.Min(self.rate, op.Reciprocal(op.Sqrt(step)))

    def update(self, slot: Slot) -> None:
        """Divide the gradient by the root of its mean square, bound that, and scale it by the parameter's size."""
        op, p, g = self.op, slot.parameter, slot.gradient
        size = float(_count(p))
        norm = op.ReduceL2(p, keepdims=0) * size**-0.5
        rate = op.Max(norm, op.like(self.least_size, p)) * self.scalar(self.relative, slot)
        estimate = self._factored(slot) if shapes.rank(p) > 1 else self._mean(slot, slot.state("variance"), g * g)
        update = g / op.Sqrt(op.Max(estimate, op.like(self.least_root**2, p)))
        bound = op.Max(op.ReduceL2(update, keepdims=0) * (size**-0.5 / self.d), op.like(1.0, p))
        # the decay takes part of the old value, which its size is read from as well: it waits for the update
        kept = p * (op.like(1.0, p) - self.rate_of(slot) * self.weight_decay) if self.decays(slot) else p
        slot.update(p, kept - update * (rate / bound))

    def _mean(self, slot: Slot, old: Value, new: Value) -> Value:
        """The running mean of squares."""
        share = self.scalar(self.share, slot)
        made = old + (new - old) * share
        slot.update(old, made)
        return made

    def _factored(self, slot: Slot) -> Value:
        """The mean square of each element from those of its row and its column."""
        op, g = self.op, slot.gradient
        *lead, rows, columns = (int(d) for d in shapes.known_dims(slot.parameter))  # type: ignore[arg-type]
        row = slot.state("row_var", [*lead, rows, 1])
        column = slot.state("col_var", [*lead, 1, columns])
        square = g * g
        row = self._mean(slot, row, op.ReduceMean(square, op.ints(-1), keepdims=1))
        column = self._mean(slot, column, op.ReduceMean(square, op.ints(-2), keepdims=1))
        mean = op.ReduceMean(row, op.ints(-2), keepdims=1)
        return row * column / op.Max(mean, op.like(self.least_root, g))


def _count(value: Value) -> int:
    found = shapes.product(shapes.known_dims(value))
    assert isinstance(found, int), "parameters have sizes that are numbers"
    return max(found, 1)


OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "AdamW": AdamW,
    "Adam": Adam,
    "SGD": SGD,
    "Lion": Lion,
    "Adafactor": Adafactor,
}
